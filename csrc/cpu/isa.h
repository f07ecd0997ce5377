// A kernel in csrc/cpu is one source, compiled once per instruction set, each time into a namespace of its own. One of
// them is picked at run time. The build sets FK_ISA for each compilation: on x86-64 to baseline, avx2, avx512,
// avx512_bf16 or, for attention alone, amx_bf16 (elsewhere that runs what avx512_bf16 does), on 64-bit ARM to neon or
// neon_bf16, elsewhere to baseline. A build for one machine compiles no more than its best set, and sets FK_LOWEST to
// it.
#pragma once

namespace foundry {

// `lowest` is FK_LOWEST: what all processors of the architecture have, or what the build says that they must have.
enum class Isa { lowest, avx2, avx512, avx512_bf16, amx_bf16, neon_bf16 };
constexpr Isa kIsas[] = {Isa::lowest, Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx_bf16, Isa::neon_bf16};

// The best instruction set that is compiled in and that this processor has, or the one set by force_isa.
Isa chosen_isa();
// Whether that is `least` or a better one, also where it is what the build has for `lowest`.
bool chosen_isa_has(Isa least);
bool isa_usable(Isa isa);  // compiled in, and this processor has it
void force_isa(Isa isa);   // for tests; the caller has checked isa_usable
const char* isa_name(Isa isa);
const char* processor_isa();  // the best that this processor has, compiled in or not

}  // namespace foundry

#if !defined(FK_LOWEST)
#if defined(__aarch64__)
#define FK_LOWEST neon
#else
#define FK_LOWEST baseline
#endif
#endif

// Declares a kernel in the namespace of every instruction set that the build compiles (FK_HAVE_*); the second is for
// kernels that amx_bf16 has its own of.
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

// An expression: the chosen instruction set's `name` as a function pointer, or that of another one.
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
