// Compiled once per instruction set (see isa.h).
#include "kl_div.h"

#include <cmath>
#include <vector>

#include "dispatch.h"
#include "logits.h"

namespace foundry {
namespace FK_ISA {

namespace {

// The natural logarithm of normal positive numbers. The error is at most 1 ulp, or 6e-8 of 1 near 1.
//
// v = 2^n (1 + f), sqrt(1/2) <= 1 + f < sqrt(2); log(1 + f) = f - f^2 / 2 + f^3 P(f) with the polynomial of Cephes.
inline FK_INLINE Vec log(Vec v) {
  const VecU bits = bit_cast<VecU>(v) + (0x3f800000u - 0x3f3504f3u);  // rounds the exponent up from sqrt(1/2) on
  const Vec n = __builtin_convertvector(bit_cast<VecI>(bits >> 23) - 127, Vec);
  const Vec f = bit_cast<Vec>((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  Vec p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec square = f * f;
  // ln 2 in two parts: n times the first is exact.
  return (f + (p * (f * square) + n * -2.12194440e-4f - 0.5f * square)) + n * 0.693359375f;
}

// log p_j = (scale x_j - max) - log_sum
struct Normalizer {
  float max, log_sum;

  template <class X>
  static Normalizer of(const X* x, int64_t n, float scale) {
    ExpSums<X, false, false> sums{x, splat(scale), Cap<false>(0.0f), -kInfinity};
    sums.add(0, n);
    return {sums.max, std::log(sum(sums.exps))};
  }

  FK_INLINE Vec log_probability(Vec y) const { return (y - max) - log_sum; }
};

// The logarithms of a few classes' probabilities of student and teacher, and what follows from them. A class of
// probability 0 adds nothing, also if the other distribution gives it an infinite logarithm.
template <Divergence kKind>
struct Classes {
  Vec log_q, log_p, q, p;

  FK_INLINE Classes(Vec log_q, Vec log_p)
      : log_q(log_q),
        log_p(log_p),
        q(exp(log_q)),
        p(exp(log_p)) {}

  static FK_INLINE Vec unless(Vec probability, Vec otherwise, Vec value) {
    return probability == 0.0f ? otherwise : value;
  }
  // p log(p / q) + q - p, and the same with q and p exchanged. Their sums are the divergences, as those of p and q are
  // 1; neither is negative but for rounding.
  FK_INLINE Vec forward() const {
    return unless(p, q, p * (log_p - log_q) + (q - p));
  }
  FK_INLINE Vec reverse() const { return unless(q, p, q * (log_q - log_p) + (p - q)); }
  // The sign of q - p.
  FK_INLINE Vec sign() const {
    return q < p ? splat(-1.0f) : p < q ? splat(1.0f) : Vec{};
  }
};

// log(p_j / m_j) and log(q_j / m_j), from e^-|d| for the distance d of the logarithms, which does not overflow.
struct Mixture {
  Vec log_p, log_q;

  template <class C>
  FK_INLINE Mixture(const C& c, const KlDivOptions& o) {
    const Vec d = c.log_p - c.log_q, e = exp(d < 0.0f ? d : -d);
    const Vec share = splat(0.0f) < d ? splat(o.student_share) : splat(o.teacher_share);
    const Vec other = splat(0.0f) < d ? splat(o.teacher_share) : splat(o.student_share);
    // other + share * e, with 1 as the sum of the shares: their float32 numbers may add up to 1 - 2e-8.
    const Vec log_of = log(e > 0.5f ? 1.0f + share * (e - 1.0f) : other + share * e);
    log_p = splat(0.0f) < d ? -log_of : d - log_of;
    log_q = splat(0.0f) < d ? -d - log_of : -log_of;
  }
};

// The divergence; and for the gradient of `mixed` KL(q || m), of `variation` half the sum of q_j s_j.
struct Found {
  float loss, of_student;
};

template <class X, Divergence kKind>
struct Row {
  const X* x;
  const X* a;
  int64_t n;
  const KlDivOptions& o;
  Normalizer student, teacher;

  Row(const X* x, const X* a, int64_t n, const KlDivOptions& o)
      : x(x),
        a(a),
        n(n),
        o(o),
        student(Normalizer::of(x, n, o.scale)),
        teacher(Normalizer::of(a, n, o.scale)) {}

  template <class At>
  FK_INLINE Classes<kKind> classes(int64_t i, At at) const {
    return {student.log_probability(at.load(x + i) * o.scale), teacher.log_probability(at.load(a + i) * o.scale)};
  }

  // The forward divergence's gradient needs nothing but the probabilities, so it is written here if dx is not null: dx
  // may be x, of which no later step reads what is written.
  Found divergence(X* dx, float dloss) const {
    Vec total[4] = {}, of_student[4] = {};
    for_each_vec_of_many(n, [&](int64_t i, auto at, int k) FK_INLINE {
      const Classes<kKind> c = classes(i, at);
      if constexpr (kKind == Divergence::forward) {
        total[k] += masked(at, c.forward(), 0.0f);
        if (dx) at.store(dx + i, (dloss * o.scale) * (c.q - c.p));
      } else if constexpr (kKind == Divergence::reverse) {
        total[k] += masked(at, c.reverse(), 0.0f);
      } else if constexpr (kKind == Divergence::variation) {
        total[k] += masked(at, c.q < c.p ? c.p - c.q : c.q - c.p, 0.0f);
        of_student[k] += masked(at, c.q * c.sign(), 0.0f);
      } else {
        const Mixture m(c, o);
        total[k] += masked(at, c.unless(c.p, Vec{}, c.p * m.log_p), 0.0f);
        of_student[k] += masked(at, c.unless(c.q, Vec{}, c.q * m.log_q), 0.0f);
      }
    });
    const float found = sum(total), student_part = sum(of_student);
    if constexpr (kKind == Divergence::mixed)
      return {o.teacher_share * found + o.student_share * student_part, student_part};
    if constexpr (kKind == Divergence::variation) return {0.5f * found, 0.5f * student_part};
    return {found, 0.0f};
  }

  void gradient(X* dx, float dloss, const Found& found) const {
    if constexpr (kKind == Divergence::reverse) {
      const float factor = dloss * o.scale;
      for_each_vec_of_many(n, [&](int64_t i, auto at, int) FK_INLINE {
        const Classes<kKind> c = classes(i, at);
        at.store(dx + i, c.unless(c.q, Vec{}, factor * (c.q * ((c.log_q - c.log_p) - found.loss))));
      });
    } else if constexpr (kKind == Divergence::mixed) {
      const float factor = dloss * o.scale * o.student_share;
      for_each_vec_of_many(n, [&](int64_t i, auto at, int) FK_INLINE {
        const Classes<kKind> c = classes(i, at);
        const Mixture m(c, o);
        at.store(dx + i, c.unless(c.q, Vec{}, factor * (c.q * (m.log_q - found.of_student))));
      });
    } else if constexpr (kKind == Divergence::variation) {
      const float factor = dloss * o.scale;
      for_each_vec_of_many(n, [&](int64_t i, auto at, int) FK_INLINE {
        const Classes<kKind> c = classes(i, at);
        at.store(dx + i, factor * (c.q * (0.5f * c.sign() - found.of_student)));
      });
    }
  }
};

// The divergence of one row; with a dloss other than 0 (NaN too), its gradient is written to dx, which may be x.
template <Divergence kKind, class X>
float one_row(const X* x, const X* t, X* dx, int64_t n, const KlDivOptions& o, float dloss) {
  const Row<X, kKind> of(x, t, n, o);
  if (dloss == 0.0f) return of.divergence(nullptr, 0.0f).loss;
  const Found found = of.divergence(dx, dloss);
  of.gradient(dx, dloss, found);
  return found.loss;
}

// Logits times the scale, capped if there is a cap, in float32.
template <class X>
__attribute__((noinline)) void capped(const X* x, int64_t n, float scale, float cap, float* out) {
  const Cap<true> of(cap);
  for_each_vec_of_many(n, [&](int64_t i, auto at, int) FK_INLINE {
    const Vec v = at.load(x + i) * scale;
    at.store(out + i, cap > 0.0f ? of(v) : v);
  });
}

// The gradient into x from that into its capped logits.
template <class X>
__attribute__((noinline)) void from_capped(const float* dy, const X* x, int64_t n, float scale, float cap, X* dx) {
  const Cap<true> of(cap);
  for_each_vec_of_many(n, [&](int64_t i, auto at, int) FK_INLINE {
    Vec d = at.load(dy + i) * scale;
    if (cap > 0.0f) d *= of.slope(of(at.load(x + i) * scale));
    at.store(dx + i, d);
  });
}

// one_row of logits that are capped before, or of two types: of float32 ones in `memory`, 2 n numbers that stay in the
// cache.
template <Divergence kKind, class X, class T>
float row_in_float(const X* x, const T* t, X* dx, int64_t n, const KlDivOptions& o, float dloss, float* memory) {
  capped(x, n, o.scale, o.student_cap, memory);
  capped(t, n, o.scale, o.teacher_cap, memory + n);
  KlDivOptions plain = o;
  plain.scale = 1.0f;
  const float loss = one_row<kKind>(memory, memory + n, memory, n, plain, dloss);  // the first becomes its gradient
  if (dloss != 0.0f) from_capped(memory, x, n, o.scale, o.student_cap, dx);
  return loss;
}

template <class X, class T, Divergence kKind>
void rows(const KlDivRows& a, int64_t begin, int64_t end) {
  const int64_t n = a.n_cols;
  constexpr bool kSame = std::is_same_v<X, T>;
  const bool in_float = !kSame || a.options.student_cap > 0.0f || a.options.teacher_cap > 0.0f;
  std::vector<float> memory(in_float ? 2 * n : 0);
  for (int64_t row = begin; row < end; ++row) {
    const bool counts = a.target[row] != a.options.ignore_index;
    const float dloss = counts && a.dlogits ? a.dloss[row] : 0.0f;
    X* dx = a.dlogits ? static_cast<X*>(a.dlogits) + row * n : nullptr;
    const bool writes = dloss != 0.0f;  // NaN too
    if (counts && (writes || a.loss)) {
      const X* x = static_cast<const X*>(a.logits) + a.logits_strides.offset(a.rows, row);
      const T* t = static_cast<const T*>(a.teacher) + a.teacher_strides.offset(a.rows, row);
      const auto found = [&] {
        if constexpr (kSame)
          if (!in_float) return one_row<kKind>(x, t, dx, n, a.options, dloss);
        return row_in_float<kKind>(x, t, dx, n, a.options, dloss, memory.data());
      };
      const float loss = found();
      if (a.loss) a.loss[row] = loss < 0.0f ? 0.0f : loss;  // by rounding; NaN stays
    } else if (a.loss) {
      a.loss[row] = 0.0f;
    }
    if (dx && !writes) write_row(dx, n, false, [](int64_t, auto) FK_INLINE { return Vec{}; });
  }
}

}  // namespace

void kl_div_rows(const KlDivRows& a, int64_t begin, int64_t end) {
  with_type(a.type, [&](auto* x) {
    with_type(a.teacher_type, [&](auto* t) {
      using X = std::remove_pointer_t<decltype(x)>;
      using T = std::remove_pointer_t<decltype(t)>;
      switch (a.options.divergence) {
        case Divergence::forward: return rows<X, T, Divergence::forward>(a, begin, end);
        case Divergence::reverse: return rows<X, T, Divergence::reverse>(a, begin, end);
        case Divergence::mixed: return rows<X, T, Divergence::mixed>(a, begin, end);
        case Divergence::variation: return rows<X, T, Divergence::variation>(a, begin, end);
      }
    });
  });
}

}  // namespace FK_ISA
}  // namespace foundry
