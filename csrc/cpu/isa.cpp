#include "isa.h"

#include <atomic>

#if defined(FK_HAVE_AMX_BF16) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(FK_HAVE_NEON_BF16)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define FK_CPU_HAS_AVX512                                                                                           \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && \
   __builtin_cpu_supports("avx512dq"))

#define FK_STRING(name) FK_STRING_OF(name)
#define FK_STRING_OF(name) #name

namespace foundry {

#if defined(FK_HAVE_AMX_BF16)
// Whether the processor has tiles of bfloat16, and Linux lets this process use them: it must be asked, once, for the
// tiles' 8 KB are more than a signal's stack may have room for.
static bool amx_usable() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, of Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// clang-format off: labels inside of macros
bool isa_usable(Isa isa) {
  switch (isa) {
    case Isa::lowest: return true;
    FK_IF_AVX2(case Isa::avx2
               : return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");)
    FK_IF_AVX512(case Isa::avx512 : return FK_CPU_HAS_AVX512;)
    FK_IF_AVX512_BF16(case Isa::avx512_bf16 : return FK_CPU_HAS_AVX512 && __builtin_cpu_supports("avx512bf16");)
    FK_IF_AMX_BF16(case Isa::amx_bf16 : {
      static const bool usable = isa_usable(Isa::avx512_bf16) && amx_usable();
      return usable;
    })
    FK_IF_NEON_BF16(case Isa::neon_bf16 : return getauxval(AT_HWCAP2) & HWCAP2_BF16;)
    default: return false;
  }
}
// clang-format on

static std::atomic<Isa>& choice() {
  static std::atomic<Isa> isa{[] {
    Isa best = Isa::lowest;
    for (const Isa candidate : kIsas)
      if (isa_usable(candidate)) best = candidate;
    return best;
  }()};
  return isa;
}

Isa chosen_isa() { return choice().load(std::memory_order_relaxed); }

void force_isa(Isa isa) { choice().store(isa); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx_bf16: return "amx_bf16";
    case Isa::avx512_bf16: return "avx512_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::neon_bf16: return "neon_bf16";
    default: return FK_STRING(FK_LOWEST);
  }
}

}  // namespace foundry
