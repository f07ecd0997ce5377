// Each kernel in csrc/cpu is one source file, compiled once per instruction set into a namespace of its own; one of
// them is chosen at run time. The build sets FK_ISA for each compilation. On x86-64: baseline, avx2, avx512,
// avx512_bf16 and, for attention alone, amx_bf16 (the other kernels then use avx512_bf16). On 64-bit ARM: neon,
// neon_bf16. Elsewhere: baseline. A build for one machine compiles only its best set and sets FK_LOWEST to it.
#pragma once

namespace foundry {

// `lowest` is FK_LOWEST: what all processors of the architecture support, or what the build requires of them.
enum class Isa { lowest, avx2, avx512, avx512_bf16, amx_bf16, neon_bf16 };
constexpr Isa kIsas[] = {Isa::lowest, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx_bf16, Isa::neon_bf16};

// The best instruction set that is compiled in and that this processor supports, or the one set by force_isa.
Isa chosen_isa();
// Whether the chosen set is `least` or better, also if the build's `lowest` stands for it.
bool chosen_isa_has(Isa least);
bool isa_usable(Isa isa);  // compiled in, and this processor supports it
void force_isa(Isa isa);   // for tests; the caller has checked isa_usable
const char* isa_name(Isa isa);
const char* processor_isa();  // the best that this processor supports, compiled in or not

}  // namespace foundry

#if !defined(FK_LOWEST)
#if defined(__aarch64__)
#define FK_LOWEST neon
#else
#define FK_LOWEST baseline
#endif
#endif

// Declares a kernel in the namespace of every instruction set that the build compiles (FK_HAVE_*). The second form is
// for kernels that are compiled for amx_bf16 too.
#define FK_DECLARE_PER_ISA(ret, name, ...)   \
  FK_DECLARE_BUT_AMX(ret, name, __VA_ARGS__) \
  FK_IF_AMX_BF16(namespace foundry::amx_bf16 { using avx512_bf16::name; })
#define FK_DECLARE_PER_ISA_AND_AMX(ret, name, ...) \
  FK_DECLARE_BUT_AMX(ret, name, __VA_ARGS__)       \
  FK_IF_AMX_BF16(namespace foundry::amx_bf16 { ret name(__VA_ARGS__); })
#define FK_DECLARE_BUT_AMX(ret, name, ...)                            \
  namespace foundry {                                                 \
  namespace FK_LOWEST {                                               \
  ret name(__VA_ARGS__);                                              \
  }                                                                   \
  FK_IF_AVX2(namespace avx2 { ret name(__VA_ARGS__); })               \
  FK_IF_AVX512(namespace avx512 { ret name(__VA_ARGS__); })           \
  FK_IF_AVX512_BF16(namespace avx512_bf16 { ret name(__VA_ARGS__); }) \
  FK_IF_NEON_BF16(namespace neon_bf16 { ret name(__VA_ARGS__); })     \
  }

#if defined(FK_HAVE_AVX2)
#define FK_IF_AVX2(...) __VA_ARGS__
#else
#define FK_IF_AVX2(...)
#endif
#if defined(FK_HAVE_AVX512)
#define FK_IF_AVX512(...) __VA_ARGS__
#else
#define FK_IF_AVX512(...)
#endif
#if defined(FK_HAVE_AVX512_BF16)
#define FK_IF_AVX512_BF16(...) __VA_ARGS__
#else
#define FK_IF_AVX512_BF16(...)
#endif
#if defined(FK_HAVE_AMX_BF16)
#define FK_IF_AMX_BF16(...) __VA_ARGS__
#else
#define FK_IF_AMX_BF16(...)
#endif
#if defined(FK_HAVE_NEON_BF16)
#define FK_IF_NEON_BF16(...) __VA_ARGS__
#else
#define FK_IF_NEON_BF16(...)
#endif

// The kernel `name` of the chosen (or given) instruction set, as a function pointer.
#define FK_CHOOSE_ISA(name) FK_CHOOSE_ISA_OF(::foundry::chosen_isa(), name)
#define FK_CHOOSE_ISA_OF(isa, name)                                                               \
  ([](::foundry::Isa of) -> decltype(& ::foundry::FK_LOWEST::name) {                              \
    switch (of) {                                                                                 \
      FK_IF_AMX_BF16(case ::foundry::Isa::amx_bf16 : return &::foundry::amx_bf16::name;)          \
      FK_IF_AVX512_BF16(case ::foundry::Isa::avx512_bf16 : return &::foundry::avx512_bf16::name;) \
      FK_IF_AVX512(case ::foundry::Isa::avx512 : return &::foundry::avx512::name;)                \
      FK_IF_AVX2(case ::foundry::Isa::avx2 : return &::foundry::avx2::name;)                      \
      FK_IF_NEON_BF16(case ::foundry::Isa::neon_bf16 : return &::foundry::neon_bf16::name;)       \
      default: return &::foundry::FK_LOWEST::name;                                                \
    }                                                                                             \
  }(isa))
