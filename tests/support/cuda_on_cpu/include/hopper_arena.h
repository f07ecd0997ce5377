// Shared memory by address, with what was done to each place.
//
// The unit is a chunk of 16 bytes; one that is written by words is divided into four cells for good. Beside ordinary
// accesses a chunk may be in use by what runs asynchronously: a copy that fills it, a copy that reads it, and products
// that read it. While one is under way, no other access may touch the place, whatever has been waited for by whom;
// afterwards accesses must be ordered after its end.
#pragma once

#include <memory>

#include "hopper_clocks.h"

namespace cuda_on_cpu {
namespace hopper {

constexpr uint32_t kBase = 1024;  // of shared memory: 0 is no address
constexpr unsigned kMaxWarpgroups = kMaxThreads / 128;

struct Cell {
  bool written = false;
  Stamp writer;         // from Clocks::threads() on: an mbarrier whose copy wrote
  uint32_t fences = 0;  // of the writer before it wrote
  Stamp reader;         // since; step 0: nobody
  int readers = -1;     // steps of all, where some are in no order
};

struct Chunk {
  Cell whole;
  std::unique_ptr<std::array<Cell, 4>> words;
  uint8_t barriers = 0;                             // words that belong to an mbarrier
  int filled_by = 0;                                // line of the copy that is under way to here
  int stores = 0, store_line = 0;                   // copies from here that have not read yet
  std::array<uint16_t, kMaxWarpgroups> products{};  // of each warpgroup that have not been waited for
  std::array<uint32_t, kMaxWarpgroups> ended{};     // 1 + the wait after which the last one had ended

  Cell* begin(unsigned word) { return words ? words->data() + word : &whole; }
  Cell* end(unsigned word, unsigned count) { return words ? words->data() + word + count : &whole + 1; }
};

// The wait of a warpgroup for products. A warp waits as one: what one of its lanes tells others holds for all.
struct Wait {
  unsigned first;  // thread
  std::array<uint32_t, 128> steps;
  int line;  // of the last product
};

inline std::string line_text(int line) { return "line " + std::to_string(line); }

class Arena {
 public:
  Clocks clocks;
  Fences proxy;  // fence_proxy_async

  void begin(unsigned threads, size_t bytes) {
    clocks.begin(threads);
    proxy.begin(threads);
    bytes_.assign((bytes + 15) / 16 * 16, 0xFF);
    size_ = bytes;
    chunks_.clear();
    chunks_.resize(bytes_.size() / 16);
    steps_.clear();
    unused_.clear();
    waits_.clear();
    passed_ = {};
  }
  size_t size() const { return size_; }

  // `at` as an offset.
  size_t place(uint32_t at, size_t bytes, unsigned alignment) const {
    if (at % alignment)
      fail("shared address " + std::to_string(at) + " is not a multiple of " + std::to_string(alignment));
    if (at < kBase || at - kBase + bytes > size_)
      fail("shared address " + std::to_string(at) + " is outside of " + std::to_string(kBase) + ".." +
           std::to_string(kBase + size_ - 1));
    return at - kBase;
  }
  unsigned char* data(uint32_t at) { return &bytes_[at - kBase]; }
  Chunk& chunk(uint32_t at) { return chunks_[(at - kBase) / 16]; }

  void read(uint32_t at, unsigned bytes, void* to) {
    const size_t offset = place(at, bytes, bytes);
    Chunk& c = chunks_[offset / 16];
    const unsigned word = offset / 4 % 4, count = bytes / 4;
    check_free(c, word, count, "read");
    for (Cell* cell = c.begin(word); cell != c.end(word, count); ++cell) {
      check_written(*cell, clocks.row(self().id));
      note_read(*cell);
    }
    std::memcpy(to, &bytes_[offset], bytes);
  }

  void write(uint32_t at, unsigned bytes, const void* from) {
    const size_t offset = place(at, bytes, bytes);
    Chunk& c = chunks_[offset / 16];
    const unsigned word = offset / 4 % 4, count = bytes / 4;
    if (count < 4) divide(c);
    check_overwrite(c, word, count);
    for (Cell* cell = c.begin(word); cell != c.end(word, count); ++cell)
      renew(*cell, clocks.now(self().id), proxy.count(self().id));
    if (count == 4) c.ended = {};
    std::memcpy(&bytes_[offset], from, bytes);
  }

  // A copy to here is issued: all earlier uses must be over.
  void claim(uint32_t at, uint32_t bytes, int line) {
    for (uint32_t i = 0; i < bytes; i += 16) {
      Chunk& c = chunk(at + i);
      check_overwrite(c, 0, 4);
      for (Cell* cell = c.begin(0); cell != c.end(0, 4); ++cell)
        if (cell->written) check_visible(*cell, clocks.row(self().id), "a copy overwrites");
      c.filled_by = line;
      c.ended = {};
    }
  }
  // It has come.
  void deliver(uint32_t at, const unsigned char* from, uint32_t bytes, Stamp by) {
    std::memcpy(data(at), from, bytes);
    for (uint32_t i = 0; i < bytes; i += 16) {
      Chunk& c = chunk(at + i);
      c.filled_by = 0;
      for (Cell* cell = c.begin(0); cell != c.end(0, 4); ++cell) renew(*cell, by, 0);
    }
  }

  // A copy from here is issued, and has read.
  void begin_store(uint32_t at, uint32_t bytes, int line) {
    for (uint32_t i = 0; i < bytes; i += 16) {
      Chunk& c = chunk(at + i);
      check_source(c, clocks.row(self().id), "a bulk copy reads");
      ++c.stores;
      c.store_line = line;
    }
  }
  void end_store(uint32_t at, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += 16) {
      Chunk& c = chunk(at + i);
      --c.stores;
      for (Cell* cell = c.begin(0); cell != c.end(0, 4); ++cell) note_read(*cell);
    }
  }

  // A product of a warpgroup that has seen `clock` reads here.
  void begin_product(uint32_t at, unsigned warpgroup, const uint32_t* clock) {
    Chunk& c = chunk(at);
    check_source(c, clock, "wgmma reads");
    ++c.products[warpgroup];
  }
  void end_product(uint32_t at, unsigned warpgroup) {
    Chunk& c = chunk(at);
    --c.products[warpgroup];
    c.ended[warpgroup] = uint32_t(waits_.size());
  }
  void waited(unsigned first, int line) {  // before end_product of the same wait
    Wait wait{first, {}, line};
    for (unsigned i = 0; i < 128; ++i) wait.steps[i] = clocks.now(first + i).step;
    waits_.push_back(wait);
  }

 private:
  std::string name(Stamp s) const {
    return s.who < clocks.threads() ? "thread " + std::to_string(s.who)
                                    : "a copy (whose mbarrier has to be waited for)";
  }
  [[noreturn]] void race(const char* what, Stamp other, const char* did) const {
    fail(std::string("race: shared memory is ") + what + " without a barrier after " + name(other) + " " + did + " it");
  }

  void check_free(const Chunk& c, unsigned word, unsigned count, const char* what) const {
    if (c.barriers >> word & ((1u << count) - 1)) fail(std::string("an mbarrier is ") + what + " as ordinary memory");
    if (c.filled_by)
      fail(std::string("shared memory is ") + what + " while the copy of " + line_text(c.filled_by) +
           " fills it: its mbarrier has not been waited for");
  }
  void check_written(const Cell& cell, const uint32_t* clock) const {
    if (!cell.written) fail("shared memory is read before it is written");
    if (clock[cell.writer.who] < cell.writer.step) race("read", cell.writer, "wrote");
  }
  void check_visible(const Cell& cell, const uint32_t* clock, const char* who) const {
    if (cell.writer.who < clocks.threads() && !proxy.visible(clock, cell.writer.who, cell.fences))
      fail(std::string(who) + " what thread " + std::to_string(cell.writer.who) +
           " wrote by ordinary stores without fence_proxy_async after them");
  }
  // `clock`: of who reads asynchronously.
  void check_source(Chunk& c, const uint32_t* clock, const char* who) const {
    check_free(c, 0, 4, "read");
    for (Cell* cell = c.begin(0); cell != c.end(0, 4); ++cell) {
      check_written(*cell, clock);
      check_visible(*cell, clock, who);
    }
  }
  void check_overwrite(Chunk& c, unsigned word, unsigned count) {
    check_free(c, word, count, "written");
    if (c.stores)
      fail("shared memory is written before the bulk copy of " + line_text(c.store_line) +
           " has read it: bulk_wait_read has not been passed");
    const uint32_t* clock = clocks.row(self().id);
    for (unsigned w = 0; w < (clocks.threads() + 127) / 128; ++w) {
      if (c.products[w])
        fail("shared memory is written while products of warpgroup " + std::to_string(w) +
             " read it: they have not been waited for (a stage released early?)");
      if (c.ended[w] == 0) continue;
      const Wait& wait = waits_[c.ended[w] - 1];
      const Passed now{c.ended[w], self().id, clocks.version(self().id)};
      if (now == passed_[w]) continue;
      for (unsigned warp = 0; warp < 4; ++warp) {
        bool seen = false;
        for (unsigned i = 32 * warp; i < 32 * warp + 32; ++i) seen |= clock[wait.first + i] >= wait.steps[i];
        if (!seen)
          fail("race: shared memory is written without a barrier after warp " + std::to_string(wait.first / 32 + warp) +
               " waited for the product of " + line_text(wait.line) + " that reads it (a stage released early?)");
      }
      passed_[w] = now;
    }
    for (Cell* cell = c.begin(word); cell != c.end(word, count); ++cell) {
      if (cell->written && clock[cell->writer.who] < cell->writer.step) race("written", cell->writer, "wrote");
      if (clock[cell->reader.who] < cell->reader.step) race("written", cell->reader, "read");
      if (cell->readers < 0) continue;
      const int unseen = first_unseen(clock, steps_[size_t(cell->readers)].data(), clocks.threads());
      if (unseen >= 0) race("written", {uint32_t(unseen), 0}, "read");
    }
  }
  void note_read(Cell& cell) {
    const Stamp now = clocks.now(self().id);
    if (cell.readers >= 0) {
      steps_[size_t(cell.readers)][now.who] = now.step;
    } else if (clocks.seen(now.who, cell.reader)) {
      cell.reader = now;
    } else {
      cell.readers = new_steps(std::vector<uint32_t>(clocks.threads(), 0));
      steps_[size_t(cell.readers)][cell.reader.who] = cell.reader.step;
      steps_[size_t(cell.readers)][now.who] = now.step;
    }
  }
  int new_steps(std::vector<uint32_t> steps) {
    if (unused_.empty()) {
      steps_.push_back(std::move(steps));
      return int(steps_.size()) - 1;
    }
    const int at = unused_.back();
    unused_.pop_back();
    steps_[size_t(at)] = std::move(steps);
    return at;
  }
  void renew(Cell& cell, Stamp writer, uint32_t fences) {
    if (cell.readers >= 0) unused_.push_back(cell.readers);
    cell = {true, writer, fences, {}, -1};
  }
  void divide(Chunk& c) {
    if (c.words) return;
    c.words.reset(new std::array<Cell, 4>{c.whole, c.whole, c.whole, c.whole});
    for (unsigned i = 1; i < 4 && c.whole.readers >= 0; ++i) {
      std::vector<uint32_t> copy = steps_[size_t(c.whole.readers)];
      (*c.words)[i].readers = new_steps(std::move(copy));
    }
  }

  struct Passed {
    uint32_t wait = 0;
    unsigned thread = 0;
    uint64_t version = 0;
    bool operator==(const Passed& other) const {
      return wait == other.wait && thread == other.thread && version == other.version;
    }
  };
  std::vector<unsigned char> bytes_;
  size_t size_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<std::vector<uint32_t>> steps_;  // of readers in no order
  std::vector<int> unused_;                   // of these
  std::vector<Wait> waits_;
  std::array<Passed, kMaxWarpgroups> passed_;  // that were found in order last
};

}  // namespace hopper
}  // namespace cuda_on_cpu
