// Shared memory that checks each access: its index, that the value was written, and races.
#pragma once

#include <array>

#include "fibers.h"

namespace cuda_on_cpu {

struct Access {
  uint64_t epoch = 0;
  uint32_t step = 0;
  unsigned thread = 0;

  bool current() const { return epoch >= machine().first_epoch; }
  // Whether the running thread may rely on this access having happened before.
  bool ordered() const {
    const Machine& m = machine();
    const Thread& t = *m.running;
    return epoch < m.epoch || thread == t.id || (t.clock_epoch == m.epoch && (*t.clock)[thread] >= step);
  }
  static Access now() { return {machine().epoch, self().step, self().id}; }
};

// What was done to an element.
struct History {
  Access written;
  std::vector<Access> reads;  // since it was written, in one epoch: older ones are before all that comes

  void read() {
    if (!written.ordered()) race("read", written, "wrote");
    if (!reads.empty() && reads.back().epoch != machine().epoch) reads.clear();
    for (size_t i = reads.size(); i > 0 && i + 4 > reads.size(); --i)  // as far back as pays
      if (reads[i - 1].thread == self().id) {
        reads[i - 1] = Access::now();
        return;
      }
    reads.push_back(Access::now());
  }
  void check_write() const {
    if (!written.ordered()) race("written", written, "wrote");
    if (reads.empty() || reads.back().epoch != machine().epoch) return;
    for (const Access& r : reads)
      if (!r.ordered()) race("written", r, "read");
  }
  void write() {
    check_write();
    reads.clear();
    written = Access::now();
  }
  [[noreturn]] static void race(const char* what, const Access& other, const char* did) {
    fail(std::string("race: shared memory is ") + what + " without a barrier after thread " +
         std::to_string(other.thread) + " " + did + " it");
  }
};

template <class T>
struct Cell {
  T value;
  History history;

  T read() {
    if (!history.written.current()) fail("shared memory is read before it is written");
    history.read();
    return value;
  }
  void write(T v) {
    history.write();
    value = v;
  }
};

// A chunk of 16 bytes, which may also be written by words of 4, by different threads, and filled by a copy.
template <>
struct Cell<uint4> {
  std::array<uint32_t, 4> words;
  History whole;                  // accesses of all words at once
  std::array<Access, 4> written;  // words written alone since the last write of the whole
  bool in_flight = false;         // a copy is on its way here
  bool committed = false;
  Access issued;

  uint4 read() {
    check_landed("read");
    for (const Access& word : written) {
      if (!whole.written.current() && !word.current()) fail("shared memory is read before it is written");
      if (!word.ordered()) History::race("read", word, "wrote");
    }
    whole.read();
    return {words[0], words[1], words[2], words[3]};
  }
  void write(uint4 v) {
    check_landed("written");
    for (Access& word : written)
      if (!word.ordered()) History::race("written", word, "wrote");
    whole.write();
    written = {};
    words = {v.x, v.y, v.z, v.w};
  }
  void write_word(unsigned i, uint32_t v) {
    check_landed("written");
    if (!written[i].ordered()) History::race("written", written[i], "wrote");
    whole.check_write();  // what it says of reads holds for the other words too
    written[i] = Access::now();
    words[i] = v;
  }
  // All that must come before a copy must come before its issue; what it brings is there when it is delivered.
  void issue() {
    write({~0u, ~0u, ~0u, ~0u});  // NaN
    in_flight = true;
    committed = false;
    issued = Access::now();
  }
  void deliver(uint4 v) {
    in_flight = false;
    write(v);
  }

 private:
  void check_landed(const char* what) const {
    if (in_flight && issued.current())
      fail(std::string("shared memory is ") + what + " while cp.async fills it: thread " +
           std::to_string(issued.thread) + " has not " + (committed ? "waited for" : "committed") + " the copy");
  }
};

// What shared[i] is: reads and writes go through the cell's checks.
template <class T>
struct Reference {
  Cell<T>& cell;
  operator T() const { return cell.read(); }
  Reference& operator=(T v) {
    cell.write(v);
    return *this;
  }
  Reference& operator=(const Reference& other) { return *this = T(other); }
  Reference& operator+=(T v) { return *this = T(*this) + v; }
};

template <class T>
struct Cells {
  std::vector<Cell<T>> cells;
  size_t count = 0;
  Reference<T> at(long long i) {
    if (machine().meetings)
      fail("FK_SHARED or FK_DYNAMIC_SHARED in a kernel of launch_hopper, whose blocks run at the same time");
    if (i < 0 || size_t(i) >= count)
      fail("shared memory index " + std::to_string(i) + " is outside of 0.." + std::to_string(long(count) - 1));
    return {cells[size_t(i)]};
  }
};

template <class T, size_t kCount>
struct SharedArray : Cells<T> {
  static_assert(kCount * sizeof(T) <= (48 << 10), "static shared memory is limited to 48 KB");
  SharedArray() { this->cells.resize(this->count = kCount); }
  Reference<T> operator[](long long i) { return this->at(i); }
};

template <class T>
struct DynamicShared : Cells<T> {
  Reference<T> operator[](long long i) {
    this->count = machine().dynamic_shared / sizeof(T);
    if (this->cells.size() < this->count) this->cells.resize(this->count);
    return this->at(i);
  }
};

}  // namespace cuda_on_cpu
