// Copies between global and shared memory (TMA) of the checker, of one block.
//
// A load is under way until the scheduler delivers it: at random, or when nothing else can move. It reads global memory
// then. A store reads shared memory when its thread waits for that, and writes global memory when its thread waits for
// that, or the block ends: both as late as they may.
#pragma once

#include "hopper_barriers.h"
#include "hopper_tensor_map.h"

namespace cuda_on_cpu {
namespace hopper {

using foundry::cuda::hopper::TensorMap;

struct Load {
  TensorMap map;  // or, without data, bytes in a row
  const unsigned char* from;
  uint32_t to, bytes;
  std::array<int, 4> at;
  Barrier* barrier;
  unsigned thread;
  int line;
};
struct Store {
  unsigned char* to;
  uint32_t from, bytes;
  bool adds;
  int line;
  bool read = false;
  std::vector<unsigned char> data;
};
struct Stores {  // of one thread
  std::vector<Store> open, groups;
  bool acquired = false;  // what others wrote to global memory, without fence_proxy_async_global since
};

class Copies {
 public:
  Copies(Arena& arena, Barriers& barriers) : arena_(arena), barriers_(barriers) {}
  void begin(unsigned threads) {
    loads_.clear();
    stores_.assign(threads, {});
  }

  void load_box(uint32_t to, const TensorMap* map, uint32_t barrier, std::array<int, 4> at, int line) {
    if (map->made != TensorMap::kMade) fail("tma_load by a tensor map that encode_map has not made");
    const uint32_t bytes = 128 * uint32_t(map->rows);
    arena_.place(to, bytes, 1024);
    issue({*map, nullptr, to, bytes, at, &barriers_.use("tma_load", barrier, line), self().id, line});
  }
  void load_row(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, int line) {
    check_row("bulk_load", from, bytes);
    arena_.place(to, bytes, 16);
    issue({{},
           static_cast<const unsigned char*>(from),
           to,
           bytes,
           {},
           &barriers_.use("bulk_load", barrier, line),
           self().id,
           line});
  }
  size_t under_way() const { return loads_.size(); }
  void deliver(size_t i) {
    const Load load = loads_[i];
    loads_.erase(loads_.begin() + long(i));
    std::vector<unsigned char> data(load.bytes, 0);
    if (load.map.data) read_box(load, data.data());
    else std::memcpy(data.data(), load.from, load.bytes);
    arena_.deliver(load.to, data.data(), load.bytes, barriers_.bring(*load.barrier, load.bytes, load.line));
  }
  unsigned issuer(size_t i) const { return loads_[i].thread; }
  int line(size_t i) const { return loads_[i].line; }

  void store(void* to, uint32_t from, uint32_t bytes, bool adds, int line) {
    const char* name = adds ? "bulk_add" : "bulk_store";
    check_row(name, to, bytes);
    arena_.place(from, bytes, 16);
    arena_.begin_store(from, bytes, line);
    Stores& mine = stores_[self().id];
    if (mine.acquired) fail(std::string(name) + " after load_acquire or wait_until without fence_proxy_async_global");
    mine.open.push_back({static_cast<unsigned char*>(to), from, bytes, adds, line, false, {}});
  }
  void commit() {
    Stores& s = stores_[self().id];
    s.groups.insert(s.groups.end(), s.open.begin(), s.open.end());
    s.open.clear();
  }
  void wait_read() {
    for (Store& s : stores_[self().id].groups) {
      if (s.read) continue;
      s.read = true;
      s.data.assign(arena_.data(s.from), arena_.data(s.from) + s.bytes);
      arena_.end_store(s.from, s.bytes);
    }
  }
  void wait() {
    wait_read();
    Stores& mine = stores_[self().id];
    for (Store& s : mine.groups) write(s);
    mine.groups.clear();
  }
  void acquire(bool yes) { stores_[self().id].acquired = yes; }
  bool writing(unsigned thread) const { return !stores_[thread].open.empty() || !stores_[thread].groups.empty(); }
  // What the block leaves behind that is a mistake, or "".
  std::string left() const {
    if (!loads_.empty()) return "the kernel ends though nobody has waited for the copy of " + line_text(loads_[0].line);
    for (const Stores& of : stores_) {
      if (!of.open.empty())
        return "the kernel ends before the bulk copy of " + line_text(of.open[0].line) + " was committed";
      for (const Store& s : of.groups)
        if (!s.read) return "the kernel ends before bulk_wait_read of the bulk copy of " + line_text(s.line);
    }
    return "";
  }
  void finish() {
    for (Stores& of : stores_)
      for (Store& s : of.groups) write(s);
  }

 private:
  void issue(const Load& load) {
    arena_.claim(load.to, load.bytes, load.line);
    loads_.push_back(load);
  }
  static void check_row(const char* name, const void* p, uint32_t bytes) {
    check_aligned(p, 16);
    if (bytes == 0 || bytes % 16)
      fail(std::string(name) + " of " + std::to_string(bytes) + " bytes, not a multiple of 16");
    const volatile unsigned char* byte = static_cast<const volatile unsigned char*>(p);
    (void)(byte[0] + byte[bytes - 1]);  // a fault is that of the thread
  }
  // As csrc/cuda/hopper/tensor_map.cuh says.
  static void read_box(const Load& load, unsigned char* to) {
    const TensorMap& map = load.map;
    const auto inside = [&](int d, int64_t i) { return i >= 0 && i < map.sizes[size_t(d)]; };
    if (!inside(2, load.at[2]) || !inside(3, load.at[3])) return;
    const unsigned char* head = map.data + load.at[2] * map.strides[2] + load.at[3] * map.strides[3];
    for (int r = 0; r < map.rows; ++r) {
      if (!inside(1, int64_t(load.at[1]) + r)) continue;
      const unsigned char* row = head + (int64_t(load.at[1]) + r) * map.strides[1];
      for (int c = 0; c < 64; c += 8) {
        const int64_t column = int64_t(load.at[0]) + c;
        unsigned char* chunk = to + 128 * r + 16 * (c / 8 ^ r % 8);
        if (inside(0, column) && inside(0, column + 7)) std::memcpy(chunk, row + 2 * column, 16);
        else
          for (int i = 0; i < 8; ++i)
            if (inside(0, column + i)) std::memcpy(chunk + 2 * i, row + 2 * (column + i), 2);
      }
    }
  }
  static void write(const Store& s) {
    if (!s.adds) {
      std::memcpy(s.to, s.data.data(), s.bytes);
      return;
    }
    float* to = reinterpret_cast<float*>(s.to);
    const float* from = reinterpret_cast<const float*>(s.data.data());
    for (uint32_t i = 0; i < s.bytes / 4; ++i) to[i] += from[i];
  }
  Arena& arena_;
  Barriers& barriers_;
  std::vector<Load> loads_;
  std::vector<Stores> stores_;
};

}  // namespace hopper
}  // namespace cuda_on_cpu
