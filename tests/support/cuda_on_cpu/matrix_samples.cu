// Small kernels of csrc/cuda/mma.cuh, right and wrong. run_sample returns the checker's report, "" if there is none;
// nvcc compiles the kernels as well.
#include "../../../csrc/cuda/mma.cuh"

namespace {

using namespace foundry::cuda;
using bf16 = __nv_bfloat16;
using f16 = __half;

// --- right -----------------------------------------------------------------------------------------------------------

// a, b: each lane's registers, 4 and 2; out: its accumulators, before and after.
template <class T>
__global__ void fragments(const uint32_t* a, const uint32_t* b, float* out) {
  const int lane = threadIdx.x;
  uint32_t left[4];
  float sums[4];
  FK_UNROLL for (int i = 0; i < 4; ++i) {
    left[i] = a[lane * 4 + i];
    sums[i] = out[lane * 4 + i];
  }
  mma<T>(sums, left, b[lane * 2], b[lane * 2 + 1]);
  FK_UNROLL for (int i = 0; i < 4; ++i) out[lane * 4 + i] = sums[i];
}

// a: 4 matrices of 8 rows of 16 bytes; out: each lane's registers.
template <bool kTransposed>
__global__ void matrices(const uint32_t* a, const uint32_t*, float* out) {
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x;
  cp_async(shared, lane * 16, a + lane * 4);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t r[4];
  if (kTransposed) ldmatrix_trans(r, shared, lane * 16);
  else ldmatrix(r, shared, lane * 16);
  FK_UNROLL for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(out)[lane * 4 + i] = r[i];
  cp_async_finished();
}

// out[16, 8] = a[16, 16] b[16, 8]: both [row, column] in memory. The product goes through shared memory as T.
template <class T>
__global__ void product(const uint32_t* a, const uint32_t* b, float* out) {
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  cp_async(shared, lane * 16, a + lane * 4);
  cp_async_commit();
  cp_async(shared, 512 + lane * 16, b + lane % 16 * 4, lane < 16);  // the other half becomes zeros
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  uint32_t left[4], right[4];
  float sums[4] = {};
  ldmatrix(left, shared, (lane % 16 * 2 + lane / 16) * 16);
  cp_async_wait<0>();
  __syncthreads();
  ldmatrix_trans(right, shared, 512 + lane * 16);
  mma<T>(sums, left, right[0], right[1]);
  mma<T>(sums, left, right[2], right[3]);
  FK_UNROLL for (int half = 0; half < 2; ++half)
      store_pair(shared, (g + 8 * half) * 16 + 4 * t, pack<T>(sums[2 * half], sums[2 * half + 1]));
  __syncwarp();
  ldmatrix(right, shared, lane % 16 * 16);
  FK_UNROLL for (int half = 0; half < 2; ++half) {
    const float2 pair = unpack<T>(right[half]);
    out[(g + 8 * half) * 8 + 2 * t] = pair.x;
    out[(g + 8 * half) * 8 + 2 * t + 1] = pair.y;
  }
  cp_async_finished();
}

// a: pairs of floats; out: each pair packed, unpacked, and 2^ its first.
template <class T>
__global__ void pairs(const uint32_t* a, const uint32_t*, float* out) {
  const int i = threadIdx.x;
  const float* from = reinterpret_cast<const float*>(a);
  const uint32_t pair = pack<T>(from[2 * i], from[2 * i + 1]);
  const float2 values = unpack<T>(pair);
  reinterpret_cast<uint32_t*>(out)[i] = pair;
  out[32 + 2 * i] = values.x;
  out[32 + 2 * i + 1] = values.y;
  out[96 + i] = exp2_fast(from[2 * i]);
}

// Rows of 128 bytes; out is not used. What a line's accesses cost is counted.
template <bool kSwizzled>
__global__ void banks(const uint32_t* a, const uint32_t*, float*) {
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x, row = lane % 8, g = lane / 4, t = lane % 4;
  const auto at = [](int row, int chunk) { return uint32_t(row * 128 + (kSwizzled ? chunk ^ row : chunk) * 16); };
  for (int i = 0; i < 2; ++i) {
    const uint32_t to = at(row, lane / 8 + 4 * i);
    cp_async(shared, to, a);  // copies down a column
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t r[4];
  ldmatrix(r, shared, at(row, lane / 8));        // loads a column
  ldmatrix_trans(r, shared, at(row, lane / 8));  // loads it transposed
  __syncthreads();
  store_pair(shared, at(g, 1) + 4 * t, r[0]);  // stores accumulators
  __syncthreads();
  cp_async(shared, at(lane / 8, row), a);  // copies along rows
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  ldmatrix(r, shared, 0);  // loads one row for all
}

// --- wrong -----------------------------------------------------------------------------------------------------------

enum Mistake {
  kNone,
  kNoWait,
  kShortWait,
  kNoCommit,
  kNoBarrier,
  kOverwritten,
  kStoredInFlight,
  kCopiedTwice,
  kDivergent,
  kTwoPlaces,
  kGone,
  kMisaligned,
  kMisalignedLoad,
  kMisalignedSource,
  kOutside,
  kOutsideLoad,
  kSourceOutside,
  kNeverWaited,
};

// 64 threads copy two tiles of 64 chunks one after another to one place; each loads a neighbour's chunk.
template <Mistake kMistake>
__global__ void pipeline(const uint32_t* a, const uint32_t*, float* out) {
  FK_DYNAMIC_SHARED(uint4, shared);
  const unsigned thread = threadIdx.x, neighbour = thread == 0 ? 0 : thread - 1;
  for (int tile = 0; tile < 2; ++tile) {
    if (tile > 0 && kMistake != kOverwritten) __syncthreads();
    const uint32_t* from = a + (tile * 64 + thread) * 4 + (kMistake == kMisalignedSource ? 1 : 0);
    const uint32_t to = thread * 16 + (kMistake == kMisaligned ? 8 : kMistake == kOutside ? 16 : 0);
    // The last source is out of bounds, which matters only if it is valid.
    const bool valid = kMistake == kSourceOutside || tile * 64 + thread < 127;
    cp_async(shared, to, from, valid);
    if (kMistake == kCopiedTwice) cp_async(shared, to, from, valid);
    if (kMistake == kStoredInFlight) store_pair(shared, to, 0);
    if (kMistake != kNoCommit) cp_async_commit();
    if (kMistake == kShortWait) cp_async_wait<1>();
    else if (kMistake != kNoWait) cp_async_wait<0>();
    if (kMistake != kNoBarrier) __syncthreads();
    uint32_t r[4] = {};
    const uint32_t load = neighbour * 16 + (kMistake == kMisalignedLoad ? 4 : kMistake == kOutsideLoad ? 1024 : 0);
    if (kMistake == kGone && thread == 37) return;
    if (kMistake == kTwoPlaces && thread == 37) ldmatrix(r, shared, load);
    else if (kMistake != kDivergent || thread != 37) ldmatrix(r, shared, load);
    float sums[4] = {};
    mma<bf16>(sums, r, r[0], r[1]);
    out[thread] = sums[0];
  }
  if (kMistake == kNeverWaited) {
    __syncthreads();
    cp_async(shared, thread * 16, a);
    cp_async_commit();
  }
  cp_async_finished();
}

enum Words { kGood, kMissing, kMisplaced, kUnordered, kSame, kBackTooSoon };

// The lanes of a quad store the 4 words of a chunk; loads read it whole.
template <Words kWords>
__global__ void words(const uint32_t*, const uint32_t*, float* out) {
  FK_DYNAMIC_SHARED(uint4, shared);
  const int lane = threadIdx.x;
  uint32_t r[4];
  for (int round = 0; round < 4; ++round) {
    uint32_t to = (round * 8 + lane / 4) * 16 + lane % 4 * 4;
    if (kWords == kSame) to = to / 8 * 8;
    if (kWords == kMisplaced) to += 2;
    if (kWords != kMissing || round * 32 + lane != 127) store_pair(shared, to, uint32_t(round * 32 + lane));
  }
  if (kWords != kUnordered) __syncwarp();
  ldmatrix(r, shared, (kWords == kUnordered ? lane / 4 : lane) * 16);
  if (kWords == kBackTooSoon) store_pair(shared, lane * 4, 0);
  FK_UNROLL for (int i = 0; i < 4; ++i) out[lane * 4 + i] = float(r[i]);
}

#if !defined(FK_CUDA_ON_CPU)
template __global__ void fragments<bf16>(const uint32_t*, const uint32_t*, float*);
template __global__ void fragments<f16>(const uint32_t*, const uint32_t*, float*);
template __global__ void matrices<false>(const uint32_t*, const uint32_t*, float*);
template __global__ void matrices<true>(const uint32_t*, const uint32_t*, float*);
template __global__ void product<bf16>(const uint32_t*, const uint32_t*, float*);
template __global__ void product<f16>(const uint32_t*, const uint32_t*, float*);
template __global__ void pairs<bf16>(const uint32_t*, const uint32_t*, float*);
template __global__ void pairs<f16>(const uint32_t*, const uint32_t*, float*);
#endif

}  // namespace

#if defined(FK_CUDA_ON_CPU)
extern "C" const char* run_sample(const char* name, const uint32_t* a, const uint32_t* b, float* out) {
  static std::string report;
  const std::string wanted = name;
  cudaError_t error = cudaErrorInvalidValue;
  const auto run = [&](const char* sample, void (*kernel)(const uint32_t*, const uint32_t*, float*),
                       unsigned threads = 32) {
    if (wanted == sample) error = foundry::launch(kernel, dim3(1), dim3(threads), 1024, nullptr, a, b, out);
  };
  try {
    run("fragments_bf16", fragments<bf16>);
    run("fragments_f16", fragments<f16>);
    run("narrow_warp", fragments<f16>, 16);
    run("matrices", matrices<false>);
    run("matrices_trans", matrices<true>);
    run("product_bf16", product<bf16>);
    run("product_f16", product<f16>);
    run("pairs_bf16", pairs<bf16>);
    run("pairs_f16", pairs<f16>);
    run("banks_plain", banks<false>);
    run("banks_swizzled", banks<true>);
    run("pipeline", pipeline<kNone>, 64);
    run("no_wait", pipeline<kNoWait>, 64);
    run("short_wait", pipeline<kShortWait>, 64);
    run("no_commit", pipeline<kNoCommit>, 64);
    run("no_barrier", pipeline<kNoBarrier>, 64);
    run("overwritten", pipeline<kOverwritten>, 64);
    run("stored_in_flight", pipeline<kStoredInFlight>, 64);
    run("copied_twice", pipeline<kCopiedTwice>, 64);
    run("divergent", pipeline<kDivergent>, 64);
    run("two_places", pipeline<kTwoPlaces>, 64);
    run("gone", pipeline<kGone>, 64);
    run("misaligned", pipeline<kMisaligned>, 64);
    run("misaligned_load", pipeline<kMisalignedLoad>, 64);
    run("misaligned_source", pipeline<kMisalignedSource>, 64);
    run("outside", pipeline<kOutside>, 64);
    run("outside_load", pipeline<kOutsideLoad>, 64);
    run("source_outside", pipeline<kSourceOutside>, 64);
    run("never_waited", pipeline<kNeverWaited>, 64);
    run("words", words<kGood>);
    run("words_missing", words<kMissing>);
    run("words_misplaced", words<kMisplaced>);
    run("words_unordered", words<kUnordered>);
    run("words_same", words<kSame>);
    run("words_back_too_soon", words<kBackTooSoon>);
    report = error == cudaSuccess ? "" : cudaGetErrorString(error);
  } catch (const std::runtime_error& e) {
    report = e.what();
  }
  return report.c_str();
}
#endif
