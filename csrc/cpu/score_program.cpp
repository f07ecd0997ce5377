// Interprets score functions. Compiled once per instruction set (see isa.h).
#include "score_program.h"

#include <algorithm>

#include "score_loads.h"

namespace foundry {
namespace FK_ISA {

namespace {

// One list of instructions on `steps` steps, the first of which is step `first` of the tile.
class Interpreter {
 public:
  Interpreter(const ScorePlan& plan, ScoreMemories memory, int64_t steps, int64_t first)
      : plan_(plan),
        memory_(memory),
        steps_(steps),
        first_(first) {}

  // What is not arithmetic: the caller's.
  template <class Input> void run(const std::vector<ScoreInstruction>& instructions, Input&& input) {
    for (const ScoreInstruction& x : instructions)
      if (!input(x, *this)) compute(x);
  }

  ScoreView view(int at) const { return memory_.view(plan_, at, first_); }

  template <class F> FK_INLINE void unary(const ScoreInstruction& x, F&& f) const {
    const ScoreView to = view(x.to), a = view(x.from[0]);
    for (int64_t s = 0; s < steps_; ++s)
#pragma GCC unroll 4
      for (int64_t v = 0; v < kScoreVecs; ++v) to.store(s, v, f(a.load(s, v)));
  }
  template <class F> FK_INLINE void binary(const ScoreInstruction& x, F&& f) const {
    const ScoreView to = view(x.to), a = view(x.from[0]), b = view(x.from[1]);
    for (int64_t s = 0; s < steps_; ++s)
#pragma GCC unroll 4
      for (int64_t v = 0; v < kScoreVecs; ++v) to.store(s, v, f(a.load(s, v), b.load(s, v)));
  }
  // Of ints and masks.
  template <class F> FK_INLINE void unary_int(const ScoreInstruction& x, F&& f) const {
    unary(x, [&](Vec a) FK_INLINE { return as_float(f(as_int(a))); });
  }
  template <class F> FK_INLINE void binary_int(const ScoreInstruction& x, F&& f) const {
    binary(x, [&](Vec a, Vec b) FK_INLINE { return as_float(f(as_int(a), as_int(b))); });
  }
  // Of floats or of ints; f takes both.
  template <class F> FK_INLINE void either(const ScoreInstruction& x, F&& f) const {
    x.kind == ScoreKind::real ? binary(x, f) : binary_int(x, f);
  }
  template <class F> FK_INLINE void compared(const ScoreInstruction& x, F&& f) const {
    x.kind == ScoreKind::real
        ? binary(x, [&](Vec a, Vec b) FK_INLINE { return as_float((VecI)f(a, b)); })
        : binary_int(x, f);
  }

  void compute(const ScoreInstruction& x) const {
    switch (x.op) {
      case ScoreOp::load:
        return load_elements(plan_.loads[x.load], view(x.to), steps_, [&](int at) { return view(at); });
      case ScoreOp::to_float:
        return unary(x, [](Vec a) FK_INLINE { return __builtin_convertvector(as_int(a), Vec); });
      case ScoreOp::to_int:
        if (x.kind == ScoreKind::boolean)
          return unary_int(x, [](VecI a) FK_INLINE { return a & 1; });
        return unary(x, [](Vec a) FK_INLINE { return as_float(truncated(a)); });
      case ScoreOp::neg:
        if (x.kind == ScoreKind::integer) return unary_int(x, [](VecI a) FK_INLINE { return -a; });
        return unary(x, [](Vec a) FK_INLINE { return -a; });
      case ScoreOp::abs:
        if (x.kind == ScoreKind::integer)
          return unary_int(x, [](VecI a) FK_INLINE { return a < 0 ? -a : a; });
        return unary_int(x, [](VecI a) FK_INLINE { return a & 0x7FFFFFFF; });
      case ScoreOp::exp: return unary(x, [](Vec a) FK_INLINE { return exp_of_any(a); });
      case ScoreOp::exp2: return unary(x, [](Vec a) FK_INLINE { return exp2(a); });
      case ScoreOp::log: return unary(x, [](Vec a) FK_INLINE { return log(a); });
      case ScoreOp::log2: return unary(x, [](Vec a) FK_INLINE { return log2(a); });
      case ScoreOp::sqrt: return unary(x, [](Vec a) FK_INLINE { return sqrt(a); });
      case ScoreOp::rsqrt: return unary(x, [](Vec a) FK_INLINE { return 1.0f / sqrt(a); });
      case ScoreOp::tanh: return unary(x, [](Vec a) FK_INLINE { return tanh(a); });
      case ScoreOp::sigmoid:
        return unary(x, [](Vec a) FK_INLINE { return 1.0f / logistic_denominator(a); });
      case ScoreOp::sin:
        return unary(x, [](Vec a) FK_INLINE {
          return by_lane(a, [](float each) { return __builtin_sinf(each); });
        });
      case ScoreOp::cos:
        return unary(x, [](Vec a) FK_INLINE {
          return by_lane(a, [](float each) { return __builtin_cosf(each); });
        });
      case ScoreOp::floor: return unary(x, [](Vec a) FK_INLINE { return floor(a); });
      case ScoreOp::add: return either(x, [](auto a, auto b) FK_INLINE { return a + b; });
      case ScoreOp::sub: return either(x, [](auto a, auto b) FK_INLINE { return a - b; });
      case ScoreOp::mul: return either(x, [](auto a, auto b) FK_INLINE { return a * b; });
      case ScoreOp::div: return binary(x, [](Vec a, Vec b) FK_INLINE { return a / b; });
      case ScoreOp::floordiv:
        return binary_int(x, [](VecI a, VecI b) FK_INLINE { return Division(a, b).quotient; });
      case ScoreOp::mod:
        return binary_int(x, [](VecI a, VecI b) FK_INLINE { return Division(a, b).remainder; });
      case ScoreOp::pow:
        return binary(x, [](Vec a, Vec b) FK_INLINE {
          for (int i = 0; i < kLanes; ++i) a[i] = __builtin_powf(a[i], b[i]);
          return a;
        });
      case ScoreOp::min:
        if (x.kind == ScoreKind::integer)
          return binary_int(x, [](VecI a, VecI b) FK_INLINE { return a < b ? a : b; });
        return binary(x, [](Vec a, Vec b) FK_INLINE { return with_nan(a, b, smaller); });
      case ScoreOp::max:
        if (x.kind == ScoreKind::integer)
          return binary_int(x, [](VecI a, VecI b) FK_INLINE { return a > b ? a : b; });
        return binary(x, [](Vec a, Vec b) FK_INLINE { return with_nan(a, b, larger); });
      case ScoreOp::lt: return compared(x, [](auto a, auto b) FK_INLINE { return a < b; });
      case ScoreOp::le: return compared(x, [](auto a, auto b) FK_INLINE { return a <= b; });
      case ScoreOp::eq: return compared(x, [](auto a, auto b) FK_INLINE { return a == b; });
      case ScoreOp::bit_and: return binary_int(x, [](VecI a, VecI b) FK_INLINE { return a & b; });
      case ScoreOp::bit_or: return binary_int(x, [](VecI a, VecI b) FK_INLINE { return a | b; });
      case ScoreOp::bit_xor: return binary_int(x, [](VecI a, VecI b) FK_INLINE { return a ^ b; });
      case ScoreOp::bit_not: return unary_int(x, [](VecI a) FK_INLINE { return ~a; });
      case ScoreOp::where: {
        const ScoreView to = view(x.to), c = view(x.from[0]), a = view(x.from[1]), b = view(x.from[2]);
        for (int64_t s = 0; s < steps_; ++s)
#pragma GCC unroll 4
          for (int64_t v = 0; v < kScoreVecs; ++v)
            to.store(s, v, as_int(c.load(s, v)) != 0 ? a.load(s, v) : b.load(s, v));
        return;
      }
      case ScoreOp::copy: return unary(x, [](Vec a) FK_INLINE { return a; });
      case ScoreOp::constant: return view(x.to).store(0, 0, bit_cast<Vec>(VecU{} + x.bits));
      case ScoreOp::spread: {  // the numbers of steps
        const float* from = view(x.from[0]).data;
        const ScoreView to = view(x.to);
        for (int64_t i = 0; i < kScoreLanes; ++i) to.store(i, 0, splat(from[i]));
        return;
      }
      default: return;  // `detach` has no instruction, and the others are the caller's
    }
  }

 private:
  const ScorePlan& plan_;
  const ScoreMemories memory_;
  const int64_t steps_, first_;
};

}  // namespace

void score_block(const ScorePlan& plan, const ScoreRows& rows, float* block) {
  Interpreter interpreter(plan, {block, nullptr, nullptr, 0}, 1, 0);
  // Rows beyond the block repeat the last one, so that they read what it reads.
  const auto row = [&](int64_t i) { return rows.row + std::min(i, rows.count - 1); };
  const auto head = [&](int64_t i) {
    const int64_t h = rows.first_head + row(i) % rows.group;
    return rows.heads ? int32_t(rows.heads[h] & 0xFFFFFFFF) : int32_t(h);
  };
  interpreter.run(plan.of_block, [&](const ScoreInstruction& x, const Interpreter& by) {
    const auto fill = [&](auto&& f) {
      const ScoreView to = by.view(x.to);
      const bool one = plan.registers[x.to].layout == ScoreLayout::one;
      int32_t numbers[kScoreLanes];
      for (int64_t i = 0; i < kScoreLanes; ++i) numbers[i] = f(one ? 0 : i);
      std::memcpy(to.data, numbers, (one ? kLanes : kScoreLanes) * sizeof(float));
      return true;
    };
    switch (x.op) {
      case ScoreOp::b:
        return fill(
            [&](int64_t) { return rows.heads ? int32_t(rows.heads[rows.first_head] >> 32) : int32_t(rows.sequence); });
      case ScoreOp::h: return fill(head);
      case ScoreOp::q: return fill([&](int64_t i) { return int32_t(row(i) / rows.group); });
      case ScoreOp::offsets: {
        const ScoreLoad& l = plan.loads[x.load];
        auto* to = reinterpret_cast<int64_t*>(by.view(x.to).data);
        for (int64_t i = 0; i < kScoreLanes; ++i) to[i] = 0;
        for (int d = 0; d < int(l.dimensions.size()); ++d) {
          if (d == l.along) continue;
          const ScoreView index = by.view(l.dimensions[d].index);
          for (int64_t i = 0; i < kScoreLanes; ++i)
            to[i] += l.dimensions[d].stride * element_of(l.dimensions[d], index.number(0, i));
        }
        return true;
      }
      default: return false;
    }
  });
}

void score_tile(const ScorePlan& plan, const float* block, float* tile, float* scores, int64_t ld, int64_t rows,
                int64_t key, int64_t n) {
  const ScoreMemories memory{const_cast<float*>(block), tile, scores, ld};
  Interpreter(plan, memory, 1, 0).run(plan.of_tile, [&](const ScoreInstruction& x, const Interpreter& by) {
    if (x.op != ScoreOp::k) return false;
    int32_t numbers[kScoreLanes];
    for (int64_t i = 0; i < kScoreLanes; ++i) numbers[i] = int32_t(key + std::min(i, n - 1));
    std::memcpy(by.view(x.to).data, numbers, sizeof(numbers));
    return true;
  });
  const int64_t steps = plan.keys_in_lanes ? rows : n, lanes = plan.keys_in_lanes ? n : rows;
  for (int64_t first = 0; first < steps; first += kScoreSteps) {
    const int64_t count = std::min(kScoreSteps, steps - first);
    Interpreter(plan, memory, count, first).run(plan.of_chunk, [&](const ScoreInstruction& x, const Interpreter& by) {
      if (x.op != ScoreOp::load) return false;
      const ScoreLoad& l = plan.loads[x.load];
      if (l.along < 0) return load_diagonals(l, by.view(x.to), count, lanes, [&](int at) { return by.view(at); });
      const auto* offsets = reinterpret_cast<const int64_t*>(by.view(x.from[0]).data);
      if (plan.keys_in_lanes) load_rows(l, offsets + first, by.view(x.to), count, key, n);
      else load_columns(l, offsets, by.view(x.to), key + first, count);
      return true;
    });
  }
}

void score_gradients(const ScorePlan& plan, const float* block, const float* tile, const float* ds, float* products,
                     int64_t rows, int64_t key, int64_t n, void* const* sums) {
  const ScoreMemories memory{const_cast<float*>(block), const_cast<float*>(tile), nullptr, 0};
  for (const ScoreGradient& g : plan.gradients) {
    const ScoreView by = memory.view(plan, g.derivative, 0);
    for (int64_t s = 0; s < n; ++s)
      for (int64_t v = 0; v * kLanes < rows; ++v) {
        const Vec d = Whole::load(ds + s * kScoreLanes + v * kLanes);
        Whole::store(products + s * kScoreLanes + v * kLanes, d == Vec{} ? d : d * by.load(s, v));
      }
    add_elements(plan, memory, g, products, rows, key, n, sums[g.sums]);
  }
}

}  // namespace FK_ISA
}  // namespace foundry
