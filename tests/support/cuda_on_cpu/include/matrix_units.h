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

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <type_traits>
#include <utility>

#include "half_types.h"
#include "scheduler.h"
#include "shared_memory.h"

namespace cuda_on_cpu {

// --- bank conflicts --------------------------------------------------------------------------------------------------

// Accesses to shared memory by one place in a kernel's source, over all launches: matrices of 8 rows that were loaded,
// 8 lanes' copies, a warp's stores.
struct Traffic {
  uint64_t accesses = 0;
  uint64_t conflicts = 0;  // times that an access takes longer than without conflicts
};

// How often each bank is needed by what lanes do one after another here and at once on a GPU.
struct Banks {
  std::array<uint8_t, 32> needed{};
  uint8_t most = 0;

  void add(unsigned bank, Traffic& traffic) {
    if (most == 0) ++traffic.accesses;
    if (++needed[bank] <= most) return;
    if (++most > 1) ++traffic.conflicts;
  }
};

struct Site {
  std::string file;
  int line = 0;
  Traffic traffic;
  uint64_t first_epoch = 0;                // of the block that the rest is about
  std::vector<uint32_t> executed;          // by each thread
  std::vector<std::vector<Banks>> groups;  // of lanes that move data together: at their n-th execution

  // An access of `lanes` lanes at once, of which the running thread's needs this bank. Lanes that execute the place in
  // different rounds of a loop are taken to have met.
  void add(unsigned lanes, unsigned bank) {
    if (first_epoch != machine().first_epoch) {
      first_epoch = machine().first_epoch;
      executed.assign(machine().threads.size(), 0);
      groups.assign((machine().threads.size() + lanes - 1) / lanes, {});
    }
    std::vector<Banks>& rounds = groups[self().id / lanes];
    const uint32_t nth = executed[self().id]++;
    if (rounds.size() <= nth) rounds.resize(nth + 1);
    rounds[nth].add(bank, traffic);
  }
};

using Sites = std::map<std::pair<const char*, int>, Site>;
inline Sites& sites() {
  static Sites places;
  return places;
}
inline Site& site(const char* file, int line) {
  Site& found = sites()[{file, line}];
  if (found.line == 0) {
    const char* slash = std::strrchr(file, '/');
    found.file = slash ? slash + 1 : file;
    found.line = line;
  }
  return found;
}

// --- the instructions ------------------------------------------------------------------------------------------------

struct Copy {
  Cell<uint4>* cell;
  uint4 value;
};
struct CopyQueue {  // of one thread
  uint64_t first_epoch = 0;
  std::vector<Copy> open;                // not committed yet
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
};
inline CopyQueue& copy_queue() {
  static std::vector<CopyQueue> queues(kMaxThreads);
  CopyQueue& queue = queues[self().id];
  if (queue.first_epoch != machine().first_epoch) {
    queue = CopyQueue();
    queue.first_epoch = machine().first_epoch;
  }
  return queue;
}

// While it lives, reports name the line.
struct At {
  explicit At(int line) : before(machine().line) { machine().line = line; }
  ~At() { machine().line = before; }
  int before;
};

// Of the threads of the machine.
template <class Request>
Request** requests() {
  static std::array<std::array<Request*, kMaxThreads>, kMaxResident + 1> all;
  return all[machine().slot].data();
}

// All threads of the warp, or of the warpgroup, meet; the first that goes on computes for all of them. Their requests
// lie on their stacks.
template <class Request, class Resolve>
void meet(const char* name, Request& request, int line, const Resolve& resolve, unsigned threads = 32) {
  const unsigned first = self().id / threads * threads;
  if (first + threads > machine().threads.size())
    fail(std::string(name) + (threads == 32 ? " in a warp" : " in a warpgroup") + " of fewer than " +
         std::to_string(threads) + " threads");
  request.done = false;
  Request** slots = requests<Request>();
  slots[self().id] = &request;
  if (threads == 32) warp_exchange(name, 0xFFFFFFFFu, 0, 32, line);
  else meet_warpgroup(name, line);
  if (request.done) return;
  resolve(slots + first);
  for (unsigned i = first; i < first + threads; ++i) slots[i]->done = true;
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
void load_matrices(uint32_t (&r)[4], Shared& shared, uint32_t byte, const char* file, int line) {
  uint4 row;
  {
    const At at(line);
    row = chunk_at(shared, byte, 16).read();
  }
  LoadRequest request{false, byte, {row.x, row.y, row.z, row.w}, {}};
  meet(kTransposed ? "ldmatrix.trans" : "ldmatrix", request, line, [&](LoadRequest** warp) {
    Traffic& traffic = site(file, line).traffic;
    for (int matrix = 0; matrix < 4; ++matrix) {  // lanes 8 * matrix.. name its rows; its 128 bytes move at once
      LoadRequest** rows = warp + 8 * matrix;
      Banks banks;
      for (int i = 0; i < 8; ++i) {
        const auto same = [&](const LoadRequest* other) { return other->byte == rows[i]->byte; };
        if (std::none_of(rows, rows + i, same))
          banks.add(rows[i]->byte / 16 % 8, traffic);  // a row twice is one access
      }
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
  cuda_on_cpu::meet("mma", request, line, cuda_on_cpu::multiply<T>);
}

template <class Shared>
void ldmatrix(uint32_t (&r)[4], Shared& shared, uint32_t byte, int line = __builtin_LINE(),
              const char* file = __builtin_FILE()) {
  cuda_on_cpu::load_matrices<false>(r, shared, byte, file, line);
}
template <class Shared>
void ldmatrix_trans(uint32_t (&r)[4], Shared& shared, uint32_t byte, int line = __builtin_LINE(),
                    const char* file = __builtin_FILE()) {
  cuda_on_cpu::load_matrices<true>(r, shared, byte, file, line);
}

template <class Shared>
void store_pair(Shared& shared, uint32_t byte, uint32_t pair, int line = __builtin_LINE(),
                const char* file = __builtin_FILE()) {
  const cuda_on_cpu::At at(line);
  cuda_on_cpu::chunk_at(shared, byte, 4).write_word(byte / 4 % 4, pair);
  cuda_on_cpu::site(file, line).add(32, byte / 4 % 32);
}

template <class T>
uint32_t pack(float low, float high) {
  cuda_on_cpu::check_value(low);
  cuda_on_cpu::check_value(high);
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
  using namespace cuda_on_cpu;
  const At at(line);
  uint4 value{0, 0, 0, 0};
  if (valid) {
    check_aligned(source, 16);
    value = *static_cast<const uint4*>(source);
  }
  Cell<uint4>& cell = chunk_at(shared, byte, 16);
  cell.issue();
  copy_queue().open.push_back({&cell, value});
  site(file, line).add(8, byte / 16 % 8);
}
inline void cp_async_commit() {
  cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  for (const cuda_on_cpu::Copy& copy : queue.open) copy.cell->committed = true;
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}
template <int kLeft>
void cp_async_wait() {
  cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  for (; queue.groups.size() > kLeft; queue.groups.pop_front())
    for (const cuda_on_cpu::Copy& copy : queue.groups.front()) copy.cell->deliver(copy.value);
}
inline void cp_async_finished(int line = __builtin_LINE()) {
  const cuda_on_cpu::At at(line);
  const cuda_on_cpu::CopyQueue& queue = cuda_on_cpu::copy_queue();
  bool pending = !queue.open.empty();
  for (const auto& group : queue.groups) pending |= !group.empty();
  if (pending) cuda_on_cpu::fail("the kernel ends before its cp.async copies were waited for");
}

inline float exp2_fast(float x) {
  cuda_on_cpu::check_value(x);
  return std::exp2(x);
}

}  // namespace cuda
}  // namespace foundry

// For tests: "file:line accesses conflicts" of each place so far, a line each.
extern "C" __attribute__((used)) inline const char* cuda_on_cpu_traffic() {
  static std::string text;
  text.clear();
  for (const auto& entry : cuda_on_cpu::sites()) {
    const cuda_on_cpu::Site& s = entry.second;
    text += s.file + ":" + std::to_string(s.line) + " " + std::to_string(s.traffic.accesses) + " " +
            std::to_string(s.traffic.conflicts) + "\n";
  }
  return text.c_str();
}
extern "C" __attribute__((used)) inline void cuda_on_cpu_forget_traffic() { cuda_on_cpu::sites().clear(); }
