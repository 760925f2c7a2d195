// Enough of CUDA to run onebit.cu on the CPU, one fibre for each CUDA thread, one thread block after the other.
//
// Included before the text of onebit.cu, which it does not change. What is stricter than a GPU on purpose:
//   * __syncthreads is a real barrier: a fibre stops there until all fibres of its thread block have come; if one has returned
//     instead, the launch fails;
//   * fibres run in an order that the caller chooses (forward, backward, shuffled between any two barriers): a result that depends
//     on it is a race;
//   * dynamic shared memory is as large as the launch asked for, followed by a guard that must stay as it was, and full of NaN
//     when a thread block begins;
//   * float4, uint4, uint2 accesses are really aligned (the build traps on those that are not).

#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ucontext.h>

static_assert(sizeof(long long) == 8 && sizeof(void*) == 8, "as on the GPU");

#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(8) uint2 { unsigned int x, y; };
struct Dim3 { unsigned int x, y, z; };

static Dim3 threadIdx, blockIdx, blockDim, gridDim;

// onebit.cu declares it: extern __shared__ float4 shared_memory[];
constexpr size_t kShimShared = 48 * 1024, kShimGuard = 256;
alignas(16) float4 shared_memory[(kShimShared + kShimGuard) / sizeof(float4)];

void __syncthreads();

// the compiler must round every operation once (-ffp-contract=off)
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline unsigned int __float_as_uint(float x) { unsigned int u; std::memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned int u) { float x; std::memcpy(&x, &u, 4); return x; }
static inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
