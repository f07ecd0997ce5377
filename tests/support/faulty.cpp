// Kernels that are wrong on purpose: what tests/proof/test_sanitize.py expects the sanitizers to report. Compiled like
// csrc/cpu, and built on the same vec.h, so that its loads and stores are known to be watched.
#include "../../csrc/cpu/vec.h"

#include <cstring>

using namespace foundry;
using namespace foundry::FK_ISA;

namespace {

// The sum of x, its tail read as if it were a whole register.
float read_past(const BFloat16* x, int64_t n) {
  Vec total[4] = {};
  for (int64_t i = 0; i < n; i += kLanes) total[0] += Whole::load(x + i);
  return sum(total);
}

float write_past(BFloat16* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) Whole::store(x + i, splat(0.0f));
  return 0.0f;
}

float one_past(const BFloat16* x, int64_t n) { return x[n].bits; }

float one_before(const BFloat16* x, int64_t) { return x[-1].bits; }

float past_a_buffer(const BFloat16* x, int64_t n) {
  float buffer[8] = {};
  volatile int64_t at = 8 + (n & 0);
  buffer[at] = x[0].bits;
  return buffer[0];
}

float misaligned(const BFloat16* x, int64_t) {
  return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + 1);
}

float overflow(const BFloat16*, int64_t n) {
  volatile int32_t rows = 1 << 30;
  return static_cast<float>(rows * static_cast<int32_t>(n));
}

float right(const BFloat16* x, int64_t n) {
  Vec total[4] = {};
  for_each_vec(n, [&](int64_t i, auto at, int k) FK_INLINE { total[k] += at.load(x + i); });
  return sum(total);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) float run(const char* name, void* data, int64_t n) {
  auto* x = static_cast<BFloat16*>(data);
  if (!std::strcmp(name, "read_past")) return read_past(x, n);
  if (!std::strcmp(name, "write_past")) return write_past(x, n);
  if (!std::strcmp(name, "one_past")) return one_past(x, n);
  if (!std::strcmp(name, "one_before")) return one_before(x, n);
  if (!std::strcmp(name, "past_a_buffer")) return past_a_buffer(x, n);
  if (!std::strcmp(name, "misaligned")) return misaligned(x, n);
  if (!std::strcmp(name, "overflow")) return overflow(x, n);
  return right(x, n);
}
