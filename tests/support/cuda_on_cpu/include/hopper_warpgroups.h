// Products of warpgroups (wgmma) of the checker, and their registers.
//
// A product is checked when it is issued and made when it is waited for, the latest moment that a GPU may. Until then
// the result's registers hold a NaN of its own (kRunning), which is recognised where it is read by a function of the
// checker, and looked for again at the wait.
#pragma once

#include <deque>

#include "hopper_matrices.h"

namespace cuda_on_cpu {
namespace hopper {

struct ProductRequest {
  bool done;
  float* d;
  unsigned columns;
  const uint32_t* registers;  // of a, or null: it is in shared memory
  uint64_t a, b;
  bool across_a, across_b, half, add;
  int line;

  bool same(const ProductRequest& other) const {
    return columns == other.columns && !registers == !other.registers && a == other.a && b == other.b &&
           across_a == other.across_a && across_b == other.across_b && half == other.half && add == other.add;
  }
};

struct Result {
  std::array<float*, 128> registers;
  unsigned columns;
  std::vector<float> sums;  // [64, columns]
  int running = 0;          // products
  int line = 0;
};

struct Product {
  ProductRequest request;
  Result* result;
  std::array<const uint32_t*, 128> places;         // of a in registers
  std::vector<std::array<uint32_t, 4>> registers;  // what they held
};

class Warpgroup {
 public:
  unsigned registers = 0;  // a thread, and what it is about to get
  unsigned wanted = 0;

  Warpgroup(Arena& arena, unsigned index) : arena_(arena), index_(index), first_(128 * index) {}

  void fence() { fenced_ = true; }
  void commit() {
    groups_.push_back(std::move(open_));
    open_.clear();
  }
  void issue(ProductRequest** all) {
    const ProductRequest& one = *all[0];
    for (unsigned i = 1; i < 128; ++i)
      if (!one.same(*all[i]))
        fail("wgmma of other operands in thread " + std::to_string(first_ + i) + " than in thread " +
             std::to_string(first_));
    if (!fenced_) fail("wgmma without wgmma_fence since the last wgmma_wait");
    look();
    const uint32_t* seen = reinterpret_cast<const uint32_t*>(common_.data());
    const auto begin = [&](const Matrix& m) {
      for (unsigned i = 0; i < m.chunks(); ++i) {
        arena_.place(m.chunk(i), 16, 16);
        arena_.begin_product(m.chunk(i), index_, seen);
      }
    };
    if (!one.registers) begin(Matrix(one.a, one.across_a, 64));
    begin(Matrix(one.b, one.across_b, one.columns));
    Product p{one, &result(all), {}, {}};
    if (one.registers) {
      p.registers.resize(128);
      for (unsigned i = 0; i < 128; ++i) {
        p.places[i] = all[i]->registers;
        std::copy(p.places[i], p.places[i] + 4, p.registers[i].begin());
      }
    }
    p.result->line = one.line;
    ++p.result->running;
    open_.push_back(std::move(p));
  }
  void wait(unsigned left) {
    fenced_ = false;
    if (groups_.size() <= left) return;
    std::vector<Product> over;
    for (; groups_.size() > left; groups_.pop_front())
      for (Product& p : groups_.front()) over.push_back(std::move(p));
    if (over.empty()) return;
    arena_.waited(first_, over.back().request.line);
    for (Product& p : over) make(p);
    for (auto r = results_.begin(); r != results_.end();) {
      check_untouched(*r);
      if (r->running) {
        ++r;
        continue;
      }
      for (unsigned i = 0; i < 128; ++i)
        for (unsigned e = 0; e < r->columns / 2; ++e) r->registers[i][e] = r->sums[place(i, e, r->columns)];
      r = results_.erase(r);
    }
  }
  std::string left() const {
    if (!open_.empty())
      return "the kernel ends before the product of " + line_text(open_[0].request.line) + " was committed";
    for (const auto& group : groups_)
      if (!group.empty())
        return "the kernel ends before the product of " + line_text(group[0].request.line) + " was waited for";
    return "";
  }

 private:
  // Of register e of thread i, as csrc/cuda/hopper/products.cuh says.
  static size_t place(unsigned i, unsigned e, unsigned columns) {
    const unsigned row = i / 32 * 16 + i % 32 / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + i % 4 * 2 + e % 2;
    return size_t(row) * columns + column;
  }
  // What all of its threads have seen, so that all may read what they read together.
  void look() {
    uint64_t version = 0;
    for (unsigned i = 0; i < 128; ++i) version += arena_.clocks.version(first_ + i);
    if (!common_.empty() && version == version_) return;
    version_ = version;
    arena_.clocks.common(first_, 128, common_);
  }
  Result& result(ProductRequest** all) {
    const unsigned columns = all[0]->columns;
    for (Result& r : results_) {
      const float *begin = r.registers[0], *end = begin + r.columns / 2, *d = all[0]->d;
      if (d + columns / 2 <= begin || d >= end) continue;
      if (d != begin || columns != r.columns)
        fail("wgmma into part of the result of the product of " + line_text(r.line) + ", which still runs");
      return r;
    }
    results_.emplace_back();
    Result& r = results_.back();
    r.columns = columns;
    r.sums.assign(64 * size_t(columns), 0.f);
    for (unsigned i = 0; i < 128; ++i) {
      r.registers[i] = all[i]->d;
      for (unsigned e = 0; e < columns / 2; ++e) {
        float& v = all[i]->d[e];
        if (all[0]->add) r.sums[place(i, e, columns)] = v;
        v = float_of(kRunning);
      }
    }
    return r;
  }
  void check_untouched(const Result& r) const {
    for (unsigned i = 0; i < 128; ++i)
      for (unsigned e = 0; e < r.columns / 2; ++e)
        if (bits_of(r.registers[i][e]) != kRunning)
          fail("register " + std::to_string(e) + " of the result of thread " + std::to_string(first_ + i) +
               " was written while the product of " + line_text(r.line) + " ran");
  }
  void make(Product& p) {
    static std::vector<float> left(64 * 16), right(16 * 256);
    const ProductRequest& q = p.request;
    const auto value = [&](uint16_t bits) { return q.half ? half_values()[bits] : float_of(uint32_t(bits) << 16); };
    const Matrix b(q.b, q.across_b, q.columns);
    b.gather(arena_, value, true, right.data());
    end(b);
    if (!q.registers) {
      const Matrix a(q.a, q.across_a, 64);
      a.gather(arena_, value, false, left.data());
      end(a);
    } else {
      for (unsigned i = 0; i < 128; ++i)
        for (unsigned part = 0; part < 4; ++part) {
          const uint32_t pair = p.registers[i][part];
          if (p.places[i][part] != pair)
            fail("register " + std::to_string(part) + " of an operand of thread " + std::to_string(first_ + i) +
                 " was changed while the product of " + line_text(q.line) + " ran");
          float* to = &left[(i / 32 * 16 + i % 32 / 4 + part % 2 * 8) * 16 + part / 2 * 8 + i % 4 * 2];
          to[0] = value(uint16_t(pair));
          to[1] = value(uint16_t(pair >> 16));
        }
    }
    Result& r = *p.result;
    if (!q.add) std::fill(r.sums.begin(), r.sums.end(), 0.f);
    multiply_add(r.sums.data(), left.data(), right.data(), q.columns);
    --r.running;
  }
  void end(const Matrix& m) {
    for (unsigned i = 0; i < m.chunks(); ++i) arena_.end_product(m.chunk(i), index_);
  }

  Arena& arena_;
  unsigned index_, first_;
  bool fenced_ = false;
  std::vector<Product> open_;
  std::deque<std::vector<Product>> groups_;
  std::deque<Result> results_;
  uint64_t version_ = 0;
  Row common_;
};

}  // namespace hopper
}  // namespace cuda_on_cpu
