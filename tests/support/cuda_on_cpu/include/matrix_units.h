// The functions of csrc/cuda/mma.cuh for the checker: matrix instructions and asynchronous copies of shared memory that
// FK_DYNAMIC_SHARED(uint4, shared) declares. cuda_on_cpu.h includes it.
//   - mma and ldmatrix are rendezvous of a whole warp: a lane that does not come is reported by the scheduler.
//   - A copy reads its source and poisons its place when it is issued, and delivers when its thread waits for the
//   group,
//     the latest moment that a GPU may. Touching the place between the two is an error even across a barrier; after the
//     wait other threads still need a barrier. What earlier accesses had to be ordered before is the issue.
//   - Races are looked for by words of 4 bytes: store_pair fills the chunks that ldmatrix reads whole.
//   - Addresses out of range or misaligned, and copies that nothing waits for, are reported; bank conflicts are
//   counted.
// A product is summed in double and rounded once: a GPU's differs in the last bits.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <type_traits>
#include <utility>

namespace cuda_on_cpu {

// --- a chunk of 16 bytes ---------------------------------------------------------------------------------------------

// What was done to a chunk, or to a word of it.
struct History {
  Access written;
  std::vector<Access> reads;

  void check_read() const {
    if (!written.ordered())
      fail("race: shared memory is read without a barrier after thread " + std::to_string(written.thread) +
           " wrote it");
  }
  void check_write() const {
    if (!written.ordered())
      fail("race: shared memory is written without a barrier after thread " + std::to_string(written.thread) +
           " wrote it");
    for (const Access& r : reads)
      if (!r.ordered())
        fail("race: shared memory is written without a barrier after thread " + std::to_string(r.thread) + " read it");
  }
  void note_read() {
    if (!reads.empty() && (reads.back().epoch != machine().epoch || !reads.back().current())) reads.clear();
    if (reads.empty() || reads.back().thread != self().id) reads.push_back(Access::now());
  }
  void note_write() {
    reads.clear();
    written = Access::now();
  }
};

template <>
struct Cell<uint4> {
  std::array<uint32_t, 4> words;
  History whole;          // accesses of all four words at once
  History parts[4];       // of one
  bool in_parts = false;  // whether some word was accessed alone since the last write of the whole
  Access issued;          // by the copy that is on its way here, if one is
  bool in_flight = false;

  void check_landed(const char* what) const {
    if (in_flight && issued.current())
      fail(std::string("shared memory is ") + what + " while cp.async fills it: thread " +
           std::to_string(issued.thread) + " has not waited for the copy");
  }
  uint4 read() {
    check_landed("read");
    whole.check_read();
    for (const History& part : parts) {
      if (in_parts) part.check_read();
      if (!whole.written.current() && !part.written.current()) fail("shared memory is read before it is written");
    }
    whole.note_read();
    return {words[0], words[1], words[2], words[3]};
  }
  void write(uint4 v) {
    check_landed("written");
    whole.check_write();
    if (in_parts)
      for (History& part : parts) {
        part.check_write();
        part = History();
      }
    in_parts = false;
    set(v);
    whole.note_write();
  }
  void write_word(int i, uint32_t v) {
    check_landed("written");
    whole.check_write();
    parts[i].check_write();
    words[i] = v;
    parts[i].note_write();
    in_parts = true;
  }
  void issue() {
    write({~0u, ~0u, ~0u, ~0u});  // NaN
    issued = Access::now();
    in_flight = true;
  }
  void deliver(uint4 v) {
    in_flight = false;
    set(v);
    whole.note_write();
  }

 private:
  void set(uint4 v) { words = {v.x, v.y, v.z, v.w}; }
};

// --- bank conflicts --------------------------------------------------------------------------------------------------

struct Site {  // where a kernel's source has an instruction
  const char* file;
  int line;
};

// Accesses to shared memory that one place in the source made, over all launches. A pass moves up to 128 bytes.
struct Traffic {
  uint64_t passes = 0, conflicts = 0;  // conflicts: passes more than if all banks were different
};
inline std::map<std::pair<std::string, int>, Traffic>& traffic() {
  static std::map<std::pair<std::string, int>, Traffic> counts;
  return counts;
}

// --- the instructions ------------------------------------------------------------------------------------------------

struct Copy {
  Cell<uint4>* cell;
  uint4 value;
};
struct CopyQueue {  // of one thread
  uint64_t block_number = 0;
  std::vector<Copy> open;                // not committed yet
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
};
inline CopyQueue& copy_queue() {
  static std::vector<CopyQueue> queues(kMaxThreads);
  CopyQueue& queue = queues[self().id];
  if (queue.block_number != machine().block_number) {
    queue = CopyQueue();
    queue.block_number = machine().block_number;
  }
  return queue;
}

// All 32 lanes meet; the first that goes on computes for all of them. Their requests lie on their stacks.
template <class Request, class Resolve>
void meet(const char* name, Request& request, Site site, const Resolve& resolve) {
  static Request* slots[kMaxThreads];
  if ((self().id / 32 + 1) * 32 > machine().threads.size())
    fail(std::string(name) + " in a warp of fewer than 32 threads");
  request.done = false;
  slots[self().id] = &request;
  warp_exchange(name, 0xFFFFFFFFu, 0, 32, site.line);
  if (request.done) return;
  Request** warp = slots + self().id / 32 * 32;
  resolve(warp);
  for (int lane = 0; lane < 32; ++lane) warp[lane]->done = true;
}

template <class Shared>
Cell<uint4>& chunk_at(Shared& shared, uint32_t byte, unsigned bytes) {
  if (byte % bytes) fail("shared address " + std::to_string(byte) + " is not a multiple of " + std::to_string(bytes));
  return shared[byte / 16].cell;
}

struct LoadRequest {
  bool done;
  uint32_t byte;
  std::array<uint32_t, 4> row, result;
};

template <bool kTransposed, class Shared>
void load_matrices(uint32_t (&r)[4], Shared& shared, uint32_t byte, Site site) {
  const uint4 row = chunk_at(shared, byte, 16).read();
  LoadRequest request{false, byte, {row.x, row.y, row.z, row.w}, {}};
  meet("ldmatrix", request, site, [](LoadRequest** warp) {
    for (int matrix = 0; matrix < 4; ++matrix) {  // lanes 8 * matrix.. name its rows; its 128 bytes move at once
      LoadRequest** rows = warp + 8 * matrix;
      const auto element = [&](int i, int j) { return rows[i]->row[j / 2] >> (16 * (j % 2)) & 0xFFFFu; };
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        warp[lane]->result[matrix] =
            kTransposed ? element(j, i) | element(j + 1, i) << 16 : element(i, j) | element(i, j + 1) << 16;
      }
    }
  });
  for (int i = 0; i < 4; ++i) r[i] = request.result[i];
}

template <class T>
float half_of(uint32_t pair, int i) {
  const uint16_t bits = uint16_t(pair >> (16 * i));
  if constexpr (std::is_same<T, __half>::value) return __half2float(__half{bits});
  else return __bfloat162float(__nv_bfloat16{bits});
}

struct ProductRequest {
  bool done;
  const uint32_t* a;
  uint32_t b[2];
  float* d;
};

template <class T>
void multiply(ProductRequest** warp) {
  typedef double Row __attribute__((vector_size(64)));  // of 8 columns: the compiler need not find that out
  double left[16][16];
  Row right[16], sums[16];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const ProductRequest& own = *warp[lane];
    for (int e = 0; e < 2; ++e) {
      for (int part = 0; part < 4; ++part)
        left[g + part % 2 * 8][2 * t + part / 2 * 8 + e] = half_of<T>(own.a[part], e);
      for (int part = 0; part < 2; ++part) right[2 * t + part * 8 + e][g] = half_of<T>(own.b[part], e);
      for (int part = 0; part < 2; ++part) sums[g + part * 8][2 * t + e] = own.d[2 * part + e];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) sums[row] += left[row][k] * right[k];
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) warp[lane]->d[e] = float(sums[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2]);
}

}  // namespace cuda_on_cpu

namespace foundry {
namespace cuda {

template <class T>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  static_assert(std::is_same<T, __nv_bfloat16>::value || std::is_same<T, __half>::value, "16-bit types");
  cuda_on_cpu::ProductRequest request{false, a, {b0, b1}, d};
  cuda_on_cpu::meet("mma", request, {"", line}, cuda_on_cpu::multiply<T>);
}

template <class Shared>
void ldmatrix(uint32_t (&r)[4], Shared& shared, uint32_t byte, int line = __builtin_LINE(),
              const char* file = __builtin_FILE()) {
  cuda_on_cpu::load_matrices<false>(r, shared, byte, {file, line});
}
template <class Shared>
void ldmatrix_trans(uint32_t (&r)[4], Shared& shared, uint32_t byte, int line = __builtin_LINE(),
                    const char* file = __builtin_FILE()) {
  cuda_on_cpu::load_matrices<true>(r, shared, byte, {file, line});
}

template <class Shared>
void store_pair(Shared& shared, uint32_t byte, uint32_t pair, int line = __builtin_LINE(),
                const char* file = __builtin_FILE()) {
  (void)line, (void)file;
  cuda_on_cpu::chunk_at(shared, byte, 4).write_word(int(byte / 4 % 4), pair);
}

template <class T>
uint32_t pack(float low, float high) {
  if constexpr (std::is_same<T, __half>::value)
    return __float2half_rn(low).bits | uint32_t(__float2half_rn(high).bits) << 16;
  else return __float2bfloat16_rn(low).bits | uint32_t(__float2bfloat16_rn(high).bits) << 16;
}
template <class T>
float2 unpack(uint32_t pair) {
  return {cuda_on_cpu::half_of<T>(pair, 0), cuda_on_cpu::half_of<T>(pair, 1)};
}

template <class Shared>
void cp_async(Shared& shared, uint32_t byte, const void* source, bool valid = true, int line = __builtin_LINE(),
              const char* file = __builtin_FILE()) {
  (void)line, (void)file;
  using namespace cuda_on_cpu;
  uint4 value{0, 0, 0, 0};
  if (valid) {
    check_aligned(source, 16);
    value = *static_cast<const uint4*>(source);
  }
  Cell<uint4>& cell = chunk_at(shared, byte, 16);
  cell.issue();
  copy_queue().open.push_back({&cell, value});
}
inline void cp_async_commit() {
  cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}
template <int kLeft>
void cp_async_wait() {
  cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  for (; queue.groups.size() > kLeft; queue.groups.pop_front())
    for (const cuda_on_cpu::Copy& copy : queue.groups.front()) copy.cell->deliver(copy.value);
}
inline void cp_async_finished() {
  const cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  bool pending = !queue.open.empty();
  for (const auto& group : queue.groups) pending |= !group.empty();
  if (pending) cuda_on_cpu::fail("the kernel ends before its cp.async copies were waited for");
}

inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace cuda
}  // namespace foundry
