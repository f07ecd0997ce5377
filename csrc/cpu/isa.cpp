#include "isa.h"

#include <atomic>
#include <cstdio>
#include <cstring>

#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define FK_STRING(name) FK_STRING_OF(name)
#define FK_STRING_OF(name) #name

namespace foundry {
namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// Whether the processor has AMX and Linux lets this process use it. A process must request permission once, because the
// 8 KB of tiles may not fit on a signal's stack.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// Whether this processor supports the instruction set, compiled in or not. `lowest` means what all processors of the
// architecture support.
bool processor_has(Isa isa) {
  switch (isa) {
    case Isa::lowest: return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Isa::avx512: return has_avx512();
    case Isa::avx512_bf16: return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case Isa::amx_bf16: {
      static const bool usable = processor_has(Isa::avx512_bf16) && has_amx();
      return usable;
    }
#elif defined(__aarch64__) && defined(HWCAP2_BF16)
    case Isa::neon_bf16: return getauxval(AT_HWCAP2) & HWCAP2_BF16;
#endif
    default: return false;
  }
}

bool compiled(Isa isa) {
  switch (isa) {
    case Isa::lowest:
      FK_IF_AVX2(case Isa::avx2:)
      FK_IF_AVX512(case Isa::avx512:)
      FK_IF_AVX512_BF16(case Isa::avx512_bf16:)
      FK_IF_AMX_BF16(case Isa::amx_bf16:)
      FK_IF_NEON_BF16(case Isa::neon_bf16:)
      return true;
    default: return false;
  }
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::amx_bf16: return "amx_bf16";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::neon_bf16: return "neon_bf16";
#if defined(__aarch64__)
    default: return "neon";
#else
    default: return "baseline";
#endif
  }
}

// The instruction set that `lowest` stands for; `lowest` itself if that is the baseline.
Isa lowest_by_name() {
  for (const Isa isa : kIsas)
    if (std::strcmp(name_of(isa), FK_STRING(FK_LOWEST)) == 0) return isa;
  return Isa::lowest;
}

std::atomic<Isa>& choice() {
  static std::atomic<Isa> isa{[] {
    Isa best = Isa::lowest;
    for (const Isa candidate : kIsas)
      if (isa_usable(candidate)) best = candidate;
    return best;
  }()};
  return isa;
}

std::atomic<bool> widens_tiles{false}, widens_pairs{false}, widens_products{false};

}  // namespace

bool isa_usable(Isa isa) { return compiled(isa) && processor_has(isa == Isa::lowest ? lowest_by_name() : isa); }

Isa chosen_isa() { return choice().load(std::memory_order_relaxed); }

bool chosen_isa_has(Isa least) {
  const Isa isa = chosen_isa();
  return (isa == Isa::lowest ? lowest_by_name() : isa) >= least;
}

void force_isa(Isa isa) { choice().store(isa); }

const char* isa_name(Isa isa) { return isa == Isa::lowest ? FK_STRING(FK_LOWEST) : name_of(isa); }

const char* processor_isa() {
  const char* best = "";
  for (const Isa isa : kIsas)
    if (processor_has(isa)) best = name_of(isa);
  return best;
}

Processor processor() {
  Processor found;
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return found;
  for (const unsigned part : {ebx, edx, ecx}) found.vendor.append(reinterpret_cast<const char*>(&part), sizeof(part));
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  const unsigned family = eax >> 8 & 0xF;
  found.family = family == 0xF ? family + (eax >> 20 & 0xFF) : family;
  found.model = (eax >> 4 & 0xF) | (family == 0xF || family == 6 ? eax >> 12 & 0xF0 : 0);
  found.stepping = eax & 0xF;
#endif
  return found;
}

Bfloat16Choice bfloat16_choice() {
  const auto fast = [](const std::atomic<bool>& widens) { return !widens.load(std::memory_order_relaxed); };
  return {fast(widens_tiles), fast(widens_pairs), fast(widens_products)};
}

void choose_bfloat16(const Bfloat16Choice& choice) {
  widens_tiles = !choice.tiles;
  widens_pairs = !choice.pairs;
  widens_products = !choice.products;
}

}  // namespace foundry

#if defined(FK_PRINT_PROCESSOR_ISA)  // build_extension.py uses this to choose what to compile
int main() { return std::puts(foundry::processor_isa()) < 0; }
#endif
