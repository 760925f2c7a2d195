// The CPU kernels: the same bits as reference.py, at the speed of memory.
//
// Plain C ABI, no torch headers: built in a few seconds by cpu.py and called through ctypes. reference.py documents and defines
// what each entry point computes; this file only says how. Three rules keep the bits equal to the reference:
//   * every operation is one IEEE fp32 operation (the build flags forbid contraction into fused multiply-adds);
//   * sums follow the lanes: lane j adds planes k = 0 .. 31 in turn, then lanes are folded in halves (fold_lanes);
//   * the threads divide blocks, never a block, so the number of threads changes nothing.
//
// A block of W = block_size / 32 lanes is worked on in tiles: R vectors of N lanes, all 32 planes, with the bit words and the
// partial sums of the tile in registers. What differs between the compressing kernels is only where the values come from: a "maker"
// is called with N, R (as types) and the first lane of a tile, and returns value(v, i), which is called for each plane in turn (v:
// vector of the tile; i: first element, an index within the block). quantize() does the rest: bits, scale, residual. A new
// compressing kernel is a new maker. What a tile needs is captured by value: a store through a float pointer would otherwise make the
// compiler load every factor again.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#if !defined(__GNUC__)
#error "the kernels use the vector extensions of GCC and Clang"
#endif
#if defined(__FAST_MATH__)
#error "the kernels need IEEE arithmetic: build without -ffast-math"
#endif

#define INLINED __attribute__((always_inline))  // of a lambda
#define INLINE inline INLINED
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 19;
constexpr int kPlanes = 32;
constexpr uint32_t kSign = 0x80000000u;

// ----- vectors ----------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kNative = 16;  // lanes of the widest register
#elif defined(__AVX__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif

template <int N> struct Vec {
  typedef float F __attribute__((vector_size(4 * N)));
  typedef uint32_t U __attribute__((vector_size(4 * N)));
  typedef int32_t I __attribute__((vector_size(4 * N)));
  typedef uint16_t H __attribute__((vector_size(2 * N)));
};
template <> struct Vec<1> { using F = float; using U = uint32_t; using I = int32_t; using H = uint16_t; };
template <int N> using F = typename Vec<N>::F;
template <int N> using U = typename Vec<N>::U;
template <int N> using I = typename Vec<N>::I;
template <int N> using Int = std::integral_constant<int, N>;  // a number as the type of an argument

template <class To, class From> INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <int N> INLINE F<N> load(const float* p) { F<N> v; std::memcpy(&v, p, sizeof v); return v; }
template <int N> INLINE U<N> load(const uint32_t* p) { U<N> v; std::memcpy(&v, p, sizeof v); return v; }
template <int N> INLINE void store(float* p, F<N> v) { std::memcpy(p, &v, sizeof v); }
template <int N> INLINE void store(uint32_t* p, U<N> v) { std::memcpy(p, &v, sizeof v); }
template <int N> INLINE F<N> splat(float x) { return x - F<N>{}; }  // x - 0 keeps the sign of a zero, x + 0 would not
template <int N> INLINE U<N> splat_bits(float x) { return bits_as<U<N>>(splat<N>(x)); }

template <int N> INLINE U<N> splat(uint32_t x) { return x - U<N>{}; }
template <int N> INLINE F<N> to_floats(I<N> x) {
  if constexpr (N == 1) return static_cast<float>(x);
  else return __builtin_convertvector(x, F<N>);
}
// All bits of a lane where a comparison holds, none where it does not. (Of two numbers C++ makes a bool, of two vectors a mask.)
template <int N, class Truth> INLINE U<N> mask(Truth truth) {
  if constexpr (N == 1) return truth ? ~0u : 0u;
  else return bits_as<U<N>>(truth);
}
template <int N> INLINE F<N> root(F<N> x) {  // IEEE 754 asks for the correctly rounded root, everywhere
#if defined(__AVX512F__)
  if constexpr (N == 16) return _mm512_sqrt_ps(x);
#endif
#if defined(__AVX__)
  if constexpr (N == 8) return _mm256_sqrt_ps(x);
#endif
  if constexpr (N == 1) {
    return std::sqrt(x);
  } else {
    F<N> y;
    for (int i = 0; i < N; ++i) y[i] = std::sqrt(x[i]);  // one instruction, since errno is not asked for
    return y;
  }
}

// Asks for what a stream brings `kAhead` elements later: on Intel's processors, whose own prefetching leaves a core waiting (cpu.py
// decides). Nothing but time depends on it, and addresses past the end of a tensor are allowed.
template <int kAhead, bool kWrite = false, class T> INLINE void ask(const T* p) {
#if defined(ONEBIT_PREFETCH)
  __builtin_prefetch(p + kAhead, kWrite, 3);
#endif
}

// Bits of R vectors of N words, plane after plane, as signs.
template <int N, int R = 1> class Signs {
 public:
  Signs() = default;
  INLINE explicit Signs(const uint32_t* words) {
    for (int v = 0; v < R; ++v) word_[v] = load<N>(words + v * N);
  }
  // `magnitude` with the sign that vector v's bit of the next plane says.
  INLINE F<N> next(F<N> magnitude, int v = 0) {
    U<N>& word = word_[v];
#if defined(__AVX512F__)
    word = (word >> 1) | (word << 31);  // a rotation and one three-operand logic instruction
    return bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(magnitude) ^ (word & kSign)));
#else
    const F<N> value = bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(magnitude) ^ (word << 31)));
    word = word >> 1;
    return value;
#endif
  }

 private:
  U<N> word_[R]{};
};

// ----- 16-bit floats ----------------------------------------------------------------------------------------------------

enum Dtype : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
inline int64_t item_size(uint8_t dtype) { return dtype == kFloat32 ? 4 : 2; }

INLINE float half_to_float(uint16_t h) {
  // Exact for every half, denormals included: rebias the exponent by a multiplication with a power of two.
  uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
  uint32_t special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // inf and NaN keep their mantissa
  float scaled = bits_as<float>(magnitude) * bits_as<float>(0x77800000u);  // 2^112
  return bits_as<float>(bits_as<uint32_t>(scaled) | special | static_cast<uint32_t>(h & 0x8000) << 16);
}

INLINE float bfloat_to_float(uint16_t b) { return bits_as<float>(static_cast<uint32_t>(b) << 16); }

INLINE uint16_t float_to_bfloat(float x) {  // round to nearest, ties to even
  uint32_t u = bits_as<uint32_t>(x);
  if ((u & ~kSign) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

struct Bfloat {  // an element of a residual or a reciprocal denominator that is kept in 16 bits
  uint16_t bits;
};

template <int N> INLINE F<N> load(const Bfloat* p) {
  typename Vec<N>::H half;
  std::memcpy(&half, p, sizeof half);
  if constexpr (N == 1) return bfloat_to_float(half);
  else return bits_as<F<N>>(static_cast<U<N>>(__builtin_convertvector(half, U<N>) << 16));
}

template <int N> INLINE void store(Bfloat* p, F<N> x) {
  if constexpr (N == 1) {
    p->bits = float_to_bfloat(x);
  } else {
    const U<N> u = bits_as<U<N>>(x), nan = mask<N>(x != x);
    const U<N> rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const auto half = __builtin_convertvector(static_cast<U<N>>((rounded & ~nan) | (nan & 0x7fc0u)), typename Vec<N>::H);
    std::memcpy(p, &half, sizeof half);
  }
}

// Stores by the processor's own instruction where it has one. That does otherwise with NaN and denormal numbers: true where there was one,
// and store() has to do it again.
template <int N> INLINE uint32_t store_fast(Bfloat* p, F<N> x) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
  if constexpr (N == 16) {
    const __m256bh half = _mm512_cvtneps_pbh(x);
    std::memcpy(p, &half, sizeof half);
    return _mm512_fpclass_ps_mask(x, 0x01 | 0x20 | 0x80);
  }
#endif
  store<N>(p, x);
  return 0;
}
template <int N> INLINE uint32_t store_fast(float* p, F<N> x) { store<N>(p, x); return 0; }

void to_float(const void* from, uint8_t dtype, int64_t count, float* to) {
  const uint16_t* p = static_cast<const uint16_t*>(from);
  int64_t i = 0;
  if (dtype == kFloat32) {
    std::memcpy(to, from, count * 4);
  } else if (dtype == kBfloat16) {
    for (; i < count; ++i) to[i] = bfloat_to_float(p[i]);
  } else {
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
    for (; i < count; ++i) to[i] = half_to_float(p[i]);
  }
}

// ----- threads ----------------------------------------------------------------------------------------------------------

// IEEE arithmetic while a kernel runs: torch.set_flush_denormal() of the caller must not change the bits.
class IeeeMode {
 public:
  IeeeMode() { std::fegetenv(&saved_); std::fesetenv(FE_DFL_ENV); }
  ~IeeeMode() { std::fesetenv(&saved_); }
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;

 private:
  std::fenv_t saved_;
};

std::atomic<bool> use_openmp{true};
const pid_t loaded_by = getpid();  // as the library is loaded: at the first call it could be a child's already

// Runs work(context) in `threads` threads at once, this one included.
//
// torch's own OpenMP threads are the best team: they are awake right after backward, where threads of ours would have to share
// the cores with them. torch makes its OpenMP library's names global, so that is the one found here, whichever it is; linking
// with one at build time would bring a second. A team does not survive a fork: a child has threads for each call.
void run_team(int threads, void (*work)(void*), void* context) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const Parallel openmp = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (use_openmp && openmp != nullptr && getpid() == loaded_by) return openmp(work, context, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> helpers;
  try {
    while (static_cast<int>(helpers.size()) < threads - 1) helpers.emplace_back(work, context);
  } catch (const std::system_error&) {  // no more threads to be had
  }
  work(context);
  for (std::thread& helper : helpers) helper.join();
}

// Calls work(first, last) on pieces of [0, count), items of `elements` each. Pieces begin large (1 M elements), so that each
// thread streams from memory undisturbed, and get smaller towards the end, so that all threads finish together even if one of
// them loses its core for a while.
template <class Work> void parallel(int threads, int64_t count, int64_t elements, const Work& work) {
  if (count <= 0) return;
  struct Job {
    const Work& work;
    const int64_t count, smallest, largest, share;
    std::atomic<int64_t> next;
  };
  threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, count * elements >> 15)));
  Job job{work, count, std::max<int64_t>(1, (1 << 15) / elements), std::max<int64_t>(1, (1 << 20) / elements), 2 * threads, {0}};
  const auto take = [](void* context) {
    Job& job = *static_cast<Job*>(context);
    const IeeeMode ieee;
    int64_t at = job.next.load(std::memory_order_relaxed);
    while (at < job.count) {
      const int64_t left = job.count - at;
      const int64_t size = std::min(left, std::max(job.smallest, std::min(job.largest, left / job.share)));
      if (!job.next.compare_exchange_weak(at, at + size, std::memory_order_relaxed)) continue;
      job.work(at, at + size);
      at = job.next.load(std::memory_order_relaxed);
    }
  };
  if (threads == 1) return take(&job);
  run_team(threads, take, &job);
}

// ----- where the bits and the elements are ------------------------------------------------------------------------------

struct Payload {  // a Packed: rows of `per_row` scales (or none), then the words
  uint8_t* raw;
  int64_t row_stride;  // bytes
  int64_t per_row;     // blocks
  bool scales = true;
};

struct Block {
  float* scale;
  uint32_t* words;
};

INLINE Block block_of(const Payload& payload, int64_t block, int64_t lanes) {
  uint8_t* row = payload.raw + block / payload.per_row * payload.row_stride;
  const int64_t column = block % payload.per_row;
  return {reinterpret_cast<float*>(row) + column,
          reinterpret_cast<uint32_t*>(row + (payload.scales ? payload.per_row * 4 : 0)) + column * lanes};
}

// Asks for the words of a block that comes soon: too little per block for the hardware to see a stream in.
template <bool Write> INLINE void prefetch_words(const Payload& payload, int64_t block, int64_t lanes) {
  constexpr int64_t kAhead = 2;
  const uint32_t* words = block_of(payload, block + kAhead, lanes).words;
  for (int64_t i = 0; i < lanes; i += 16) __builtin_prefetch(words + i, Write, 3);
}

struct Spans {  // in block order; blocks between and after them are padding. cpu.py writes it, in words of 8 bytes.
  int64_t count;
  const int64_t* block;  // first block of each
  uint64_t words[];      // addresses (0: no tensor), then dtypes
};

struct Run {  // the elements of one block that a span holds
  void* data;  // null: none
  uint8_t dtype;
  int64_t length;
  int64_t span, first_block;  // number of the span, and its first block
};

// The elements of `block`, of which `length` are valid, that a tensor of the span holds.
INLINE Run run_of(const Spans& spans, int64_t span, int64_t block, int64_t length, int64_t block_size) {
  Run run{nullptr, static_cast<uint8_t>(spans.words[spans.count + span]), length, span, spans.block[span]};
  char* const data = reinterpret_cast<char*>(spans.words[span]);
  if (data != nullptr) run.data = data + (block - run.first_block) * block_size * item_size(run.dtype);
  return run;
}

// Walks the spans along with ascending blocks.
class SpanCursor {
 public:
  SpanCursor(const Spans* spans, const int32_t* lengths, int64_t block_size, int64_t first)
      : spans_(spans), lengths_(lengths), size_(block_size), count_(spans != nullptr ? spans->count : 0) {
    if (count_ > 0) at_ = std::max<int64_t>(0, std::upper_bound(spans->block, spans->block + count_, first) - spans->block - 1);
  }
  INLINE Run at(int64_t block) {
    while (at_ + 1 < count_ && spans_->block[at_ + 1] <= block) ++at_;
    if (at_ >= count_ || block < spans_->block[at_] || lengths_[block] <= 0) return Run{nullptr, kFloat32, 0, 0, 0};
    return run_of(*spans_, at_, block, lengths_[block], size_);
  }

 private:
  const Spans* spans_;
  const int32_t* lengths_;
  int64_t size_, count_, at_ = 0;
};

// Aligned scratch memory of one piece of work.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : raw_(new float[floats + 16]) {
    data_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(raw_.get()) + 63) & ~uintptr_t(63));
  }
  operator float*() { return data_; }

 private:
  std::unique_ptr<float[]> raw_;
  float* data_;
};

// The fp32 elements of a block, zeros where a span holds none: in place if it can be, else in `staged`.
inline const float* whole_block(const Run& run, int64_t block_size, float* staged) {
  if (run.data != nullptr && run.length == block_size && run.dtype == kFloat32) return static_cast<const float*>(run.data);
  const int64_t held = run.data != nullptr ? run.length : 0;
  if (held) to_float(run.data, run.dtype, held, staged);
  std::memset(staged + held, 0, (block_size - held) * 4);
  return staged;
}

// Calls work(block, run, scratch) for every block of which a tensor holds elements; scratch: so many floats of the thread's own.
template <class Work>
void for_each_run(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans, int64_t floats,
                  const Work& work) {
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    Scratch scratch(floats);
    SpanCursor cursor(spans, lengths, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const Run run = cursor.at(block);
      if (run.data != nullptr) work(block, run, static_cast<float*>(scratch));
    }
  });
}

// ----- tiles ------------------------------------------------------------------------------------------------------------

// Calls tile(N, R, lane) until all lanes are covered: wide tiles first, single lanes for odd widths last.
template <class Tile> INLINE void for_each_tile(int64_t lanes, const Tile& tile) {
  int64_t lane = 0;
  // A row of 64 lanes at once, so that memory is read in order: half a row in strides takes twice the time, words and sums that do not fit
  // AVX2's registers and stay in the first cache none.
  constexpr int wide = kNative == 16 ? 4 : 8;
  for (; lane + kNative * wide <= lanes; lane += kNative * wide) tile(Int<kNative>{}, Int<wide>{}, lane);
  for (; lane + kNative <= lanes; lane += kNative) tile(Int<kNative>{}, Int<1>{}, lane);
  if (kNative > 4)
    for (; lane + 4 <= lanes; lane += 4) tile(Int<4>{}, Int<1>{}, lane);
  for (; lane < lanes; ++lane) tile(Int<1>{}, Int<1>{}, lane);
}

// Calls work(N, lane) for one vector after the other, where arithmetic is what takes the time.
template <class Work> INLINE void for_each_vector(int64_t lanes, const Work& work) {
  for_each_tile(lanes, [=](auto n, auto r, int64_t lane) INLINED {
    for (int v = 0; v < r; ++v) work(n, lane + v * n);
  });
}

// Lets work(x), which is written for whole blocks, update the fp32 elements that a span holds of one.
template <class Work> INLINE void update_run(const Run& run, int64_t block_size, float* staged, const Work& work) {
  if (run.length == block_size) return work(static_cast<float*>(run.data));
  std::memcpy(staged, run.data, run.length * 4);
  std::memset(staged + run.length, 0, (block_size - run.length) * 4);
  work(staged);
  std::memcpy(run.data, staged, run.length * 4);
}

// acc[0:w-h] += acc[h:w] with h = (w+1)/2, until one lane is left.
INLINE float fold_lanes(float* acc, int64_t lanes) {
  while (lanes > 1 && lanes != 16) {
    const int64_t half = (lanes + 1) / 2, moved = lanes - half;
    int64_t i = 0;
    for (; i + kNative <= moved; i += kNative)
      store<kNative>(acc + i, load<kNative>(acc + i) + load<kNative>(acc + half + i));
    for (; i < moved; ++i) acc[i] += acc[half + i];
    lanes = half;
  }
  if (lanes == 16) {  // powers of two arrive here; the rest is a chain of latencies worth keeping out of loops
    const F<8> eight = load<8>(acc) + load<8>(acc + 8);
    F<4> low, high;
    std::memcpy(&low, &eight, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&eight) + sizeof low, sizeof high);
    const F<4> four = low + high;
    return (four[0] + four[2]) + (four[1] + four[3]);
  }
  return acc[0];
}

// First pass over a block: y into memory (it stays in the cache for the second pass), squares and sign bits in registers.
// planes: those that hold valid elements
template <class Maker>
INLINE void first_pass(const Maker& maker, int64_t lanes, int planes, float* y, uint32_t* words, float* acc) {
  for_each_tile(lanes, [=](auto n, auto r, int64_t lane) INLINED {
    constexpr int N = n, R = r;
    auto value = maker(n, r, lane);
    F<N> sum[R];
    U<N> word[R];
    for (int v = 0; v < R; ++v) sum[v] = F<N>{}, word[v] = U<N>{};
    for (int64_t i = lane, end = planes * lanes + lane; i < end; i += lanes)
      for (int v = 0; v < R; ++v) {
        const F<N> now = value(v, i + v * N);
        store<N>(y + i + v * N, now);
        sum[v] = sum[v] + now * now;
        word[v] = (word[v] >> 1) | (bits_as<U<N>>(now) & kSign);  // after 32 planes, bit k is plane k
      }
    const int left = kPlanes - planes;  // at most 31: a block with a valid element has a plane
    for (int v = 0; v < R; ++v) {
      store<N>(words + lane + v * N, static_cast<U<N>>(word[v] >> left));
      store<N>(acc + lane + v * N, sum[v]);
    }
  });
}

template <int N> INLINE F<N> residual_of(F<N> y, F<N> scale) {  // y - (+-scale), the sign being that of y
  return y - bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(scale) | (bits_as<U<N>>(y) & kSign)));
}

// An element of an fp32 residual from which the reader subtracts its block's scale (residual.py): y itself.
struct Deferred {
  float y;
};
template <class E> constexpr bool kHoldsY = !std::is_same_v<E, Bfloat>;  // whether y fits the residual's memory

// The residual at p; `pending`: what is still to be subtracted, of a Deferred alone.
template <int N, class E> INLINE F<N> residual_at(const E* p, F<N> pending) {
  if constexpr (std::is_same_v<E, Deferred>) return residual_of<N>(load<N>(&p->y), pending);
  else return load<N>(p);
}

// Bits, scale and residual of the block that `maker` makes. y goes through the memory of an fp32 residual: read by the maker and
// overwritten with y. A Deferred one is left at that, with the scale in `pending`; others are overwritten, while that is still in the cache,
// with the residual. A 16-bit residual has no room for y, which goes through `staged` then. A block with padding, which is always 0,
// has nothing pending.
template <class Maker, class E>
INLINE void quantize(const Maker& maker, int64_t block_size, int64_t length, E* at, float* pending, float* staged, Block out, float* acc) {
  const int64_t lanes = block_size / kPlanes;
  using Element = std::conditional_t<std::is_same_v<E, Deferred>, float, E>;
  Element* const residual = reinterpret_cast<Element*>(at);
  float* y = staged;
  if constexpr (kHoldsY<E>) y = residual;
  if constexpr (std::is_same_v<E, Deferred>) *pending = 0.0f;
  if (length <= 0) {
    *out.scale = 0.0f;
    std::memset(out.words, 0, lanes * 4);
    std::memset(residual, 0, block_size * sizeof(Element));
    return;
  }
  const int planes = static_cast<int>((length + lanes - 1) / lanes);
  first_pass(maker, lanes, planes, y, out.words, acc);
  if (length < block_size) {
    // Padding takes part in nothing. (Its y can be anything: a decoded old momentum is never 0 there.)
    std::memset(y + length, 0, (block_size - length) * 4);
    const auto from_memory = [=](auto n, auto, int64_t) INLINED {
      return [=](int, int64_t i) INLINED { return load<decltype(n)::value>(y + i); };
    };
    first_pass(from_memory, lanes, planes, y, out.words, acc);
  }
  const float scale = std::sqrt(fold_lanes(acc, lanes) / static_cast<float>(length));
  *out.scale = scale;
  if constexpr (std::is_same_v<E, Deferred>) {
    if (length == block_size) {
      *pending = scale;
      return;
    }
  }
  const F<kNative> wide = splat<kNative>(scale);
  const int64_t vectors = length / kNative * kNative;
  int64_t i = 0;
  uint32_t unusual = 0;
#pragma GCC unroll 4
  for (; i < vectors; i += kNative) unusual |= store_fast<kNative>(residual + i, residual_of<kNative>(load<kNative>(y + i), wide));
  if (unusual)
    for (i = 0; i < vectors; i += kNative) store<kNative>(residual + i, residual_of<kNative>(load<kNative>(y + i), wide));
  for (; i < length; ++i) store<1>(residual + i, residual_of<1>(y[i], scale));
  if (!kHoldsY<E>) std::memset(residual + length, 0, (block_size - length) * sizeof(Element));
}

// ----- compress ---------------------------------------------------------------------------------------------------------

enum class Momentum { kNone, kFlat, kPacked };

enum class Gradient { kNone, kPlain, kScaled };  // scaled: times r

struct CompressArgs {
  int64_t block_size, blocks;
  const int32_t* lengths;
  const float* a;
  const float* m;
  Payload m_packed;
  const float* b;
  const float* g;
  const Spans* spans;
  const void* r;
  const void* e;         // the residual that enters
  const float* pending;
  void* e_new;           // the one that is written; may be the same
  float* pending_new;
  Payload out;
};

// y = ((a*m) + ((b*g)*r)) + e ; a missing term is +0.0
template <Momentum M, Gradient G, class E, class D> void compress(int threads, const CompressArgs& x) {
  const int64_t size = x.block_size, lanes = size / kPlanes;
  parallel(threads, x.blocks, size, [&](int64_t first, int64_t last) {
    Scratch acc(lanes), staged(x.spans != nullptr ? size : 0), kept(kHoldsY<E> ? 0 : size);
    SpanCursor cursor(x.spans, x.lengths, size, first);
    for (int64_t block = first; block < last; ++block) {
      prefetch_words<true>(x.out, block, lanes);
      const E* const e = static_cast<const E*>(x.e) + block * size;
      E* const e_new = static_cast<E*>(x.e_new) + block * size;
      float* const pending = x.pending_new + (std::is_same_v<E, Deferred> ? block : 0);
      const float before = std::is_same_v<E, Deferred> ? x.pending[block] : 0.0f;
      float a = 0.0f, b = 0.0f;
      const uint32_t* words = nullptr;
      const float *m = nullptr, *g = nullptr;
      const D* r = nullptr;
      if (M != Momentum::kNone) a = x.a[block];
      if (M == Momentum::kFlat) m = x.m + block * size;
      if (M == Momentum::kPacked) {
        const Block old = block_of(x.m_packed, block, lanes);
        prefetch_words<false>(x.m_packed, block, lanes);
        words = old.words;
        a = a * *old.scale;  // since a * -s == -(a * s)
      }
      if (G != Gradient::kNone) {
        b = x.b[block];
        g = x.spans == nullptr ? x.g + block * size : whole_block(cursor.at(block), size, staged);
      }
      if (G == Gradient::kScaled) r = static_cast<const D*>(x.r) + block * size;
      const auto worker = [=](auto n, auto count, int64_t lane) INLINED {
        constexpr int N = n, R = count;
        Signs<N, R> old;
        if (M == Momentum::kPacked) old = Signs<N, R>(words + lane);
        const F<N> am = splat<N>(a), bg = splat<N>(b), due = splat<N>(before);
        return [=](int v, int64_t i) mutable INLINED {
          constexpr int kAhead = 384;  // further would push three streams out of the first cache
          F<N> y = splat<N>(0.0f);
          ask<kAhead>(e + i);
          ask<kAhead, true>(e_new + i);
          if (M == Momentum::kFlat) ask<kAhead>(m + i);
          if (G != Gradient::kNone) ask<kAhead>(g + i);
          if (G == Gradient::kScaled) ask<kAhead>(r + i);
          if (M == Momentum::kFlat) y = am * load<N>(m + i);
          if (M == Momentum::kPacked) y = old.next(am, v);
          if (G == Gradient::kNone) y = y + splat<N>(0.0f);
          if (G == Gradient::kPlain) y = y + bg * load<N>(g + i);
          if (G == Gradient::kScaled) y = y + (bg * load<N>(g + i)) * load<N>(r + i);
          return y + residual_at<N>(e + i, due);
        };
      };
      quantize(worker, size, x.lengths[block], e_new, pending, kept, block_of(x.out, block, lanes), acc);
    }
  });
}

// ----- reduce -----------------------------------------------------------------------------------------------------------

// The rows of a tile, in registers.
template <int Rows, int N, int R> struct TileRows {
  F<N> scale[Rows];
  Signs<N, R> signs[Rows];
  INLINE TileRows(const float* scales, const uint32_t* const* words, int64_t lane, int) {
    for (int row = 0; row < Rows; ++row) scale[row] = splat<N>(scales[row]), signs[row] = Signs<N, R>(words[row] + lane);
  }
  INLINE F<N> sum(int v) {
    F<N> z = signs[0].next(scale[0], v);
    for (int row = 1; row < Rows; ++row) z = z + signs[row].next(scale[row], v);
    return z;
  }
};

// Any number of rows, whose words do not fit the registers.
template <int N, int R> struct TileRows<0, N, R> {
  const float* scales;
  const uint32_t* const* words;
  int64_t lane;
  int rows, seen = 0;  // seen: calls, R for each plane
  INLINE TileRows(const float* scales, const uint32_t* const* words, int64_t lane, int rows)
      : scales(scales), words(words), lane(lane), rows(rows) {}
  INLINE F<N> term(int row, int v, int shift) const {
    const U<N> word = load<N>(words[row] + lane + v * N) << shift;
    return bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(splat<N>(scales[row])) ^ (word & kSign)));
  }
  INLINE F<N> sum(int v) {
    const int shift = kPlanes - 1 - seen++ / R;  // brings the plane's bit to the sign
    F<N> z = term(0, v, shift);
    for (int row = 1; row < rows; ++row) z = z + term(row, v, shift);
    return z;
  }
};

// z = (C_0 + C_1 + ...) * inv_n + d ; Rows = 0: any number
template <int Rows, class E>
void reduce(int threads, int64_t size, int64_t blocks, int rows, const Payload& received, const int32_t* lengths, const E* all_d,
            const float* all_pending, E* all_d_new, float* all_pending_new, const Payload& out, float inv_n) {
  const int64_t lanes = size / kPlanes;
  parallel(threads, blocks, size, [&](int64_t first, int64_t last) {
    Scratch acc(lanes), scale_of(rows), kept(kHoldsY<E> ? 0 : size);
    std::vector<const uint32_t*> words_of(rows);
    float* const scales = scale_of;
    const uint32_t** const words = words_of.data();
    for (int64_t block = first; block < last; ++block) {
      for (int row = 0; row < rows; ++row) {
        const Block in = block_of(received, row * blocks + block, lanes);
        prefetch_words<false>(received, row * blocks + block, lanes);
        scales[row] = *in.scale;
        words[row] = in.words;
      }
      const E* const d = all_d + block * size;
      E* const d_new = all_d_new + block * size;
      float* const pending = all_pending_new + (std::is_same_v<E, Deferred> ? block : 0);
      const float before = std::is_same_v<E, Deferred> ? all_pending[block] : 0.0f;
      const auto server = [=](auto n, auto r, int64_t lane) INLINED {
        constexpr int N = n, R = r;
        const F<N> share = splat<N>(inv_n), due = splat<N>(before);
        return [=, tile = TileRows<Rows, N, R>(scales, words, lane, rows)](int v, int64_t i) mutable INLINED {
          ask<2048>(d + i);
          ask<2048, true>(d_new + i);
          return tile.sum(v) * share + residual_at<N>(d + i, due);
        };
      };
      quantize(server, size, lengths[block], d_new, pending, kept, block_of(out, block, lanes), acc);
    }
  });
}

// ----- apply and unpack -------------------------------------------------------------------------------------------------

struct None {};  // in the place of the elements of what is not there

INLINE None operator+(None none, int64_t) { return none; }

// x = rule(x, +-(t*r)) with the signs of a block's bits; r: an address, or None for 1
template <class From, class Rule>
INLINE void decode(int64_t lanes, float t, const uint32_t* words, From r, float* x, const Rule& rule) {
  for_each_tile(lanes, [=](auto n, auto count, int64_t lane) INLINED {
    constexpr int N = n, R = count;
    Signs<N, R> signs(words + lane);
    const F<N> factor = splat<N>(t);
    for (int64_t i = lane, end = kPlanes * lanes + lane; i < end; i += lanes) {
      F<N> now[R];  // all loads before the first store
      for (int v = 0; v < R; ++v) {
        ask<320, true>(x + i + v * N);
        F<N> size = factor;
        if constexpr (!std::is_same_v<From, None>) {
          ask<320>(r + i + v * N);
          size = factor * load<N>(r + i + v * N);
        }
        now[v] = rule(load<N>(x + i + v * N), signs.next(size, v));
      }
      for (int v = 0; v < R; ++v) store<N>(x + i + v * N, now[v]);
    }
  });
}

// Decodes into every run of the spans, with t = alpha*scale; rule_of(first block of the span): every block of a span belongs to one
// parameter, hence one group.
template <class From, class RuleOf>
void decode_runs(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans, const Payload& packed,
                 From r, const float* alpha, const RuleOf& rule_of) {
  const int64_t lanes = block_size / kPlanes;
  for_each_run(threads, block_size, blocks, lengths, spans, block_size, [&](int64_t block, const Run& run, float* staged) {
    const Block in = block_of(packed, block, lanes);
    prefetch_words<false>(packed, block, lanes);
    const float t = alpha[block] * *in.scale;
    const auto rule = rule_of(run.first_block);
    update_run(run, block_size, staged, [&](float* x) INLINED { decode(lanes, t, in.words, r + block * block_size, x, rule); });
  });
}

// ----- BinSGDM ----------------------------------------------------------------------------------------------------------

template <int N> INLINE U<N> mix(U<N> x) {  // counter_rng._mix32
  x = x ^ (x >> 16);
  x = x * 0x7feb352du;
  x = x ^ (x >> 15);
  x = x * 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Key {
  uint32_t k0, k1, k2;
  uint32_t of_block(int64_t block) const { return mix<1>(static_cast<uint32_t>(block) ^ k0); }
};

// The draws of N elements from `first` on, by what Key::of_block says of their block.
template <int N> INLINE U<N> draws(uint32_t per_block, const Key& key, int64_t first) {
  U<N> element = splat<N>(static_cast<uint32_t>(first));
  if constexpr (N > 1)
    for (int j = 0; j < N; ++j) element[j] += static_cast<uint32_t>(j);
  return mix<N>(static_cast<U<N>>((per_block + element * 0x9e3779b9u) ^ key.k1)) + key.k2;
}

template <int N> INLINE F<N> uniform(U<N> h) {  // (2*(h >> 9) + 1 - 2^23) * 2^-23
  const U<N> odd = (h >> 9) * 2u + 1u - (1u << 23);
  return to_floats<N>(bits_as<I<N>>(odd)) * 0x1p-23f;
}

// Bits of a block's padding are 0.
inline void clear_padding(uint32_t* words, int64_t length, int64_t lanes) {
  for (int64_t i = std::max<int64_t>(0, length); i < kPlanes * lanes; ++i) words[i % lanes] &= ~(1u << (i / lanes));
}

// m = b1*m + o1*g ; a = b2*a + o2*|g| ; negative where not m > a*U (U where a is 0) ; m = m + share*(m - clip(m, -a, a))
INLINE void sample(int64_t lanes, float b1, float o1, float b2, float o2, float share, const float* g, float* m, float* a,
                   uint32_t per_block, Key key, uint32_t* words) {
  for_each_vector(lanes, [=](auto n, int64_t lane) INLINED {
    constexpr int N = n, kAhead = 512;
    U<N> word{};
    for (int64_t i = lane; i < kPlanes * lanes; i += lanes) {
      ask<kAhead, true>(m + i);
      ask<kAhead, true>(a + i);
      ask<kAhead>(g + i);
      const F<N> gradient = load<N>(g + i);
      const F<N> size = b2 * load<N>(a + i) + o2 * bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(gradient) & ~kSign));
      const F<N> moment = b1 * load<N>(m + i) + o1 * gradient;
      store<N>(a + i, size);
      const U<N> unit = bits_as<U<N>>(size) | (splat_bits<N>(1.0f) & mask<N>(size == F<N>{}));
      const F<N> threshold = bits_as<F<N>>(unit) * uniform<N>(draws<N>(per_block, key, i));
      word = (word >> 1) | (~mask<N>(moment > threshold) & kSign);
      if (share == 0.0f) {
        store<N>(m + i, moment);
        continue;
      }
      const U<N> sign = bits_as<U<N>>(moment) & kSign;
      const F<N> magnitude = bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(moment) & ~kSign));
      const U<N> excess = bits_as<U<N>>(magnitude - size) & mask<N>(magnitude > size);
      store<N>(m + i, moment + share * bits_as<F<N>>(static_cast<U<N>>(excess | sign)));
    }
    store<N>(words + lane, word);
  });
}

// carry: z = (n - 2c)*share + carry ; negative where not z >= 0 ; carry = z - sign. Otherwise negative where not n - 2c > n*U
INLINE void vote(int64_t lanes, uint32_t rows, float share, const uint32_t* const* received, uint32_t per_block, Key key, uint32_t* out,
                 float* carry) {
  for_each_vector(lanes, [=](auto n, int64_t lane) INLINED {
    constexpr int N = n;
    U<N> word{};
    for (int plane = 0; plane < kPlanes; ++plane) {
      U<N> count{};
      for (uint32_t row = 0; row < rows; ++row) count = count + ((load<N>(received[row] + lane) >> plane) & 1u);
      const F<N> balance = to_floats<N>(bits_as<I<N>>(static_cast<U<N>>(rows - 2u * count)));
      if (carry != nullptr) {
        float* const at = carry + plane * lanes + lane;
        ask<512, true>(at);
        const F<N> z = balance * share + load<N>(at);
        const U<N> sign = ~mask<N>(z >= F<N>{}) & kSign;
        store<N>(at, z - bits_as<F<N>>(static_cast<U<N>>(splat_bits<N>(1.0f) | sign)));
        word = (word >> 1) | sign;
        continue;
      }
      const U<N> h = draws<N>(per_block, key, plane * lanes + lane);
      word = (word >> 1) | (~mask<N>(balance > static_cast<float>(rows) * uniform<N>(h)) & kSign);
    }
    store<N>(out + lane, word);
  });
}

// x = x*decay + lr*ubar where live, x*decay + 0 elsewhere
INLINE void apply_votes(int64_t lanes, float decay, float lr, const uint32_t* words, const uint32_t* live, float* x) {
  for_each_vector(lanes, [=](auto n, int64_t lane) INLINED {
    constexpr int N = n;
    const U<N> negative = load<N>(words + lane), alive = load<N>(live + lane);
    for (int plane = 0; plane < kPlanes; ++plane) {
      const F<N> ubar = bits_as<F<N>>(static_cast<U<N>>(splat_bits<N>(1.0f) | (negative >> plane) << 31));
      const U<N> takes_part = U<N>{} - ((alive >> plane) & 1u);
      const F<N> delta = bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(static_cast<F<N>>(lr * ubar)) & takes_part));
      float* const at = x + plane * lanes + lane;
      ask<512, true>(at);
      store<N>(at, load<N>(at) * decay + delta);
    }
  });
}

// ----- gradient statistics ----------------------------------------------------------------------------------------------

constexpr int64_t kSumPiece = 1 << 18;

// Sum of squares in fp64, where the square of any fp32 number is exact and no sum can overflow: not finite means that an element
// is not. Fixed pieces and fixed lanes: the result does not depend on the number of threads.
//
// Four streams at once: a core that follows a single one does not have enough reads under way to use the memory's speed.
double sum_squares(const float* p, int64_t count) {
  constexpr int kLanes = 16, kStreams = 4;
  double acc[kStreams][kLanes] = {};
  const int64_t part = count / (kStreams * kLanes) * kLanes;
  for (int64_t i = 0; i < part; i += kLanes)
    for (int s = 0; s < kStreams; ++s) {
      ask<224>(p + s * part + i);
      for (int j = 0; j < kLanes; ++j) {
        const double x = p[s * part + i + j];
        acc[s][j] += x * x;
      }
    }
  for (int64_t i = kStreams * part; i < count; ++i) acc[0][i % kLanes] += static_cast<double>(p[i]) * static_cast<double>(p[i]);
  for (int j = 0; j < kLanes; ++j) acc[0][j] = (acc[0][j] + acc[1][j]) + (acc[2][j] + acc[3][j]);
  for (int half = kLanes / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) acc[0][j] += acc[0][half + j];
  return acc[0][0];
}

double sum_squares_16(const void* from, uint8_t dtype, int64_t count) {
  constexpr int64_t kStage = 4096;
  alignas(64) float staged[kStage];
  double sum = 0.0;
  for (int64_t i = 0; i < count; i += kStage) {
    const int64_t now = std::min(kStage, count - i);
    to_float(static_cast<const char*>(from) + i * 2, dtype, now, staged);
    sum += sum_squares(staged, now);
  }
  return sum;
}

}  // namespace

// ----- entry points -----------------------------------------------------------------------------------------------------

// Calls work(p) with an address of state in the type that its dtype says: fp32, or bf16 in half the memory.
template <class Work> INLINE void by_dtype(const void* p, int dtype, const Work& work) {
  dtype == kBfloat16 ? work(static_cast<const Bfloat*>(p)) : work(static_cast<const float*>(p));
}
template <class Pointer> using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;

// Calls work(an element of a residual), which says how it is kept.
template <class Work> INLINE void by_residual(int dtype, const float* pending, const Work& work) {
  if (dtype == kBfloat16) return work(Bfloat{});
  pending != nullptr ? work(Deferred{}) : work(0.0f);
}

EXPORT int onebit_abi() { return kAbi; }

// For measurements and tests: 0 makes the kernels use threads of their own where they would use torch's OpenMP team.
EXPORT void onebit_use_openmp(int yes) { use_openmp = yes != 0; }

EXPORT void onebit_gather(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans, float* out) {
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    SpanCursor cursor(spans, lengths, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const Run run = cursor.at(block);
      const int64_t held = run.data != nullptr ? run.length : 0;
      if (held) to_float(run.data, run.dtype, held, out + block * block_size);
      std::memset(out + block * block_size + held, 0, (block_size - held) * 4);
    }
  });
}

// result: sum of all squares, tensors whose own is not finite; of_each: the sum of each, or null
EXPORT void onebit_grad_stats(int threads, int64_t tensors, const int64_t* numel, const void* const* data,
                              const uint8_t* dtype, double* result, double* of_each) {
  std::vector<int64_t> first_piece(tensors + 1, 0);
  for (int64_t t = 0; t < tensors; ++t) first_piece[t + 1] = first_piece[t] + (numel[t] + kSumPiece - 1) / kSumPiece;
  std::vector<double> sums(first_piece[tensors]);
  parallel(threads, first_piece[tensors], kSumPiece, [&](int64_t first, int64_t last) {
    int64_t t = std::upper_bound(first_piece.begin(), first_piece.end(), first) - first_piece.begin() - 1;
    for (int64_t piece = first; piece < last; ++piece) {
      while (first_piece[t + 1] <= piece) ++t;
      const int64_t start = (piece - first_piece[t]) * kSumPiece, count = std::min(kSumPiece, numel[t] - start);
      const char* from = static_cast<const char*>(data[t]) + start * item_size(dtype[t]);
      sums[piece] = dtype[t] == kFloat32 ? sum_squares(reinterpret_cast<const float*>(from), count)
                                         : sum_squares_16(from, dtype[t], count);
    }
  });
  double squares = 0.0, bad = 0.0;
  for (int64_t t = 0; t < tensors; ++t) {
    double sum = 0.0;
    for (int64_t piece = first_piece[t]; piece < first_piece[t + 1]; ++piece) sum += sums[piece];
    if (of_each != nullptr) of_each[t] = sum;
    bad += std::isfinite(sum) ? 0.0 : 1.0;
    squares += sum;
  }
  result[0] = squares;
  result[1] = bad;
}

template <Momentum M, class E> void compress(int threads, const CompressArgs& x, int r_dtype) {
  if (x.g == nullptr && x.spans == nullptr) return compress<M, Gradient::kNone, E, float>(threads, x);
  if (x.r == nullptr) return compress<M, Gradient::kPlain, E, float>(threads, x);
  by_dtype(x.r, r_dtype, [&](auto r) { compress<M, Gradient::kScaled, E, Element<decltype(r)>>(threads, x); });
}

// m: flat (m), packed (m_raw) or neither; g: flat (g), spans or neither, times r where that is given.
EXPORT void onebit_compress(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const float* a,
                            const float* m, uint8_t* m_raw, int64_t m_stride, int64_t m_per_row, const float* b,
                            const float* g, const Spans* spans, const void* r, int r_dtype, const void* e, int e_dtype,
                            const float* pending, void* e_new, float* pending_new, uint8_t* out_raw, int64_t out_stride,
                            int64_t out_per_row) {
  const CompressArgs x{block_size, blocks, lengths, a, m, {m_raw, m_stride, m_per_row}, b, g, spans, r, e, pending, e_new, pending_new,
                       {out_raw, out_stride, out_per_row}};
  by_residual(e_dtype, pending, [&](auto element) {
    using E = decltype(element);
    if (m != nullptr) return compress<Momentum::kFlat, E>(threads, x, r_dtype);
    if (m_raw != nullptr) return compress<Momentum::kPacked, E>(threads, x, r_dtype);
    compress<Momentum::kNone, E>(threads, x, r_dtype);
  });
}

EXPORT void onebit_reduce(int threads, int64_t block_size, int64_t blocks, int64_t rows, uint8_t* raw, int64_t stride,
                          const int32_t* lengths, const void* d, int d_dtype, const float* pending, void* d_new,
                          float* pending_new, uint8_t* out_raw, int64_t out_stride, float inv_n) {
  by_residual(d_dtype, pending, [&](auto element) {
    const auto of = [&](auto known) {
      using E = decltype(element);
      reduce<known>(threads, block_size, blocks, static_cast<int>(rows), {raw, stride, blocks}, lengths, static_cast<const E*>(d),
                    pending, static_cast<E*>(d_new), pending_new, {out_raw, out_stride, blocks}, inv_n);
    };
    switch (rows) {
      case 1: return of(Int<1>{});
      case 2: return of(Int<2>{});
      case 3: return of(Int<3>{});
      case 4: return of(Int<4>{});
      default: return of(Int<0>{});
    }
  });
}

// values: a Deferred residual, of which nothing is pending afterwards
EXPORT void onebit_subtract(int threads, int64_t block_size, int64_t blocks, float* values, float* pending) {
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      float* const y = values + block * block_size;
      const F<kNative> wide = splat<kNative>(pending[block]);
      int64_t i = 0;
      for (; i + kNative <= block_size; i += kNative) store<kNative>(y + i, residual_of<kNative>(load<kNative>(y + i), wide));
      for (; i < block_size; ++i) y[i] = residual_of<1>(y[i], pending[block]);
      pending[block] = 0.0f;
    }
  });
}

EXPORT void onebit_unpack(int threads, int64_t block_size, int64_t blocks, uint8_t* raw, int64_t stride, int64_t per_row,
                          const int32_t* lengths, float* out) {
  const Payload packed{raw, stride, per_row};
  const int64_t lanes = block_size / kPlanes;
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      float* to = out + block * block_size;
      const int64_t length = std::max<int64_t>(0, lengths[block]);
      const Block in = block_of(packed, block, lanes);
      if (length) decode(lanes, *in.scale, in.words, None{}, to, [](auto, auto value) INLINED { return value; });
      std::memset(to + length, 0, (block_size - length) * 4);
    }
  });
}

EXPORT void onebit_apply_adam(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans,
                              uint8_t* raw, int64_t stride, int64_t per_row, const void* r, int r_dtype, const float* decay,
                              const float* alpha) {
  const auto apply = [&](auto from) {
    decode_runs(threads, block_size, blocks, lengths, spans, {raw, stride, per_row}, from, alpha, [&](int64_t span) {
      return [keep = decay[span]](auto x, auto update) INLINED { return x * keep - update; };
    });
  };
  r != nullptr ? by_dtype(r, r_dtype, apply) : apply(None{});
}

EXPORT void onebit_lamb_apply(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans,
                              uint8_t* raw, int64_t stride, int64_t per_row, const void* r, int r_dtype, const float* alpha,
                              const float* wd, const float* step) {
  by_dtype(r, r_dtype, [&](auto from) {
    decode_runs(threads, block_size, blocks, lengths, spans, {raw, stride, per_row}, from, alpha, [&](int64_t span) {
      return [decay = wd[span], rate = step[span]](auto x, auto update) INLINED { return x - rate * (update + decay * x); };
    });
  });
}

// ghat = (m - b1*m_old)*i1 ; fresh = b2*fresh + o2*(ghat*ghat) ; up = (+-t)*r ; u = up + wd*x ; ratio = 1/(r*(sqrt(fresh*c2) + eps))
// factors: 8 rows of one fp32 per block (b1, i1, b2, o2, c2, eps, alpha, wd); out: 3 fp32 per block, and 0 where there is no tensor
EXPORT void onebit_lamb_update(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans,
                               uint8_t* raw, int64_t stride, int64_t per_row, const float* old, uint8_t* old_raw,
                               int64_t old_stride, int64_t old_per_row, const void* all_r, int r_dtype, float* fresh,
                               const float* factors, float* out) {
  const Payload now{raw, stride, per_row}, before{old_raw, old_stride, old_per_row};
  const int64_t lanes = block_size / kPlanes;
  std::fill(out, out + 3 * blocks, 0.0f);
  by_dtype(all_r, r_dtype, [&](auto from) {
    for_each_run(threads, block_size, blocks, lengths, spans, block_size + 3 * lanes, [&](int64_t block, const Run& run, float* staged) {
      const float* const f = factors + block;
      const float b1 = f[0], i1 = f[blocks], b2 = f[2 * blocks], o2 = f[3 * blocks], c2 = f[4 * blocks], eps = f[5 * blocks];
      const float alpha = f[6 * blocks], wd = f[7 * blocks];
      const Block in = block_of(now, block, lanes), was = old_raw != nullptr ? block_of(before, block, lanes) : Block{};
      const float scale = *in.scale, t = alpha * scale, old_scale = old_raw != nullptr ? *was.scale : 0.0f;
      const float *const x = whole_block(run, block_size, staged), *const m_old = old_raw != nullptr ? nullptr : old + block * block_size;
      const auto* const r = from + block * block_size;
      float *const moments = fresh + block * block_size, *const up_acc = staged + block_size, *const u_acc = up_acc + lanes;
      // per lane, as bits: for numbers >= 0 these are in the order of the values, and a NaN is above all
      uint32_t* const largest = reinterpret_cast<uint32_t*>(u_acc + lanes);
      const auto update = [=, length = run.length](auto n, int64_t lane) INLINED {
        constexpr int N = n, kAhead = 512;  // N is 1 in a block with padding
        Signs<N> sign(in.words + lane), old_sign;
        if (m_old == nullptr) old_sign = Signs<N>(was.words + lane);
        F<N> up_sum{}, u_sum{};
        U<N> top{};
        for (int64_t i = lane; i < kPlanes * lanes && (N > 1 || i < length); i += lanes) {
          ask<kAhead, true>(moments + i);
          ask<kAhead>(r + i);
          ask<kAhead>(x + i);
          const U<N> bit = bits_as<U<N>>(sign.next(F<N>{})) & kSign;
          const F<N> m = bits_as<F<N>>(static_cast<U<N>>(splat_bits<N>(scale) ^ bit));
          const F<N> m0 = m_old == nullptr ? old_sign.next(splat<N>(old_scale)) : load<N>(m_old + i);
          const F<N> ghat = (m - b1 * m0) * i1;
          const F<N> learned = b2 * load<N>(moments + i) + o2 * (ghat * ghat);
          store<N>(moments + i, learned);
          const F<N> reciprocal = load<N>(r + i);
          const F<N> up = bits_as<F<N>>(static_cast<U<N>>(splat_bits<N>(t) ^ bit)) * reciprocal;
          const F<N> u = up + wd * load<N>(x + i);
          up_sum = up_sum + up * up;
          u_sum = u_sum + u * u;
          const F<N> ratio = 1.0f / (reciprocal * (root<N>(learned * c2) + eps));
          const U<N> seen = bits_as<U<N>>(ratio) & mask<N>(reciprocal > F<N>{});
          const U<N> above = mask<N>(seen > top);
          top = (seen & above) | (top & ~above);
        }
        store<N>(up_acc + lane, up_sum);
        store<N>(u_acc + lane, u_sum);
        store<N>(largest + lane, top);
      };
      if (run.length == block_size) {
        for_each_vector(lanes, update);
      } else {
        for (int64_t lane = 0; lane < lanes; ++lane) update(Int<1>{}, lane);
      }
      out[3 * block] = fold_lanes(up_acc, lanes);
      out[3 * block + 1] = fold_lanes(u_acc, lanes);
      out[3 * block + 2] = bits_as<float>(*std::max_element(largest, largest + lanes));
    });
  });
}

// spans: weights (fp32); gradients: of the same spans; factors: 5 rows of one fp32 per block (b1, o1, lr, decay, bound)
EXPORT void onebit_local_step(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans,
                              const Spans* gradients, float* m, float* u, const void* r, int r_dtype, float* anchor,
                              const float* factors) {
  by_dtype(r, r_dtype, [&](auto from) {
    for_each_run(threads, block_size, blocks, lengths, spans, block_size, [&](int64_t block, const Run& run, float* staged) {
      const auto factor = [&](int row) { return factors[row * blocks + run.first_block]; };
      const float b1 = factor(0), o1 = factor(1), lr = factor(2), decay = factor(3), bound = factor(4);
      const int64_t at = block * block_size;
      const float* const g = whole_block(run_of(*gradients, run.span, block, run.length, block_size), block_size, staged);
      float* __restrict x = static_cast<float*>(run.data);
      float *__restrict mb = m + at, *__restrict ub = u + at, *__restrict ab = anchor + at;
      const auto* __restrict rb = from + at;
      for (int64_t i = 0; i < run.length; ++i) {
        const float moment = b1 * mb[i] + o1 * g[i];
        const float p = lr * moment;
        mb[i] = moment;
        ub[i] = ub[i] + p;
        // comparisons in this order let NaN through
        const float step = p * load<1>(rb + i), above = step > bound ? bound : step;
        x[i] = x[i] * decay - (above < -bound ? -bound : above);
        ab[i] = ab[i] * decay;
      }
    });
  });
}

// factors: 5 rows of one fp32 per block (b1, o1, b2, o2, keep); g: flat, or null where the spans are given; out: bits without scales
EXPORT void onebit_sample(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const float* factors,
                          const float* g, const Spans* spans, float* m, float* a, uint32_t k0, uint32_t k1, uint32_t k2,
                          int64_t first_block, uint8_t* out_raw, int64_t out_stride, int64_t out_per_row) {
  const Payload out{out_raw, out_stride, out_per_row, false};
  const Key key{k0, k1, k2};
  const int64_t lanes = block_size / kPlanes;
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    Scratch staged(block_size);
    SpanCursor cursor(spans, lengths, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const int64_t at = block * block_size;
      const float* from = g != nullptr ? g + at : whole_block(cursor.at(block), block_size, staged);
      uint32_t* const words = block_of(out, block, lanes).words;
      const auto factor = [&](int row) { return factors[row * blocks + block]; };
      sample(lanes, factor(0), factor(1), factor(2), factor(3), factor(4), from, m + at, a + at,
             key.of_block(first_block + block), key, words);
      clear_padding(words, lengths[block], lanes);
    }
  });
}

// out: the words of each block; share: 1 / rows
EXPORT void onebit_vote(int threads, int64_t block_size, int64_t blocks, int64_t rows, uint8_t* raw, int64_t stride,
                        const int32_t* lengths, uint32_t k0, uint32_t k1, uint32_t k2, int64_t first_block, uint32_t* out,
                        float share, float* carry) {
  const Payload received{raw, stride, blocks, false};
  const Key key{k0, k1, k2};
  const int64_t lanes = block_size / kPlanes;
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    std::vector<const uint32_t*> words(rows);
    for (int64_t block = first; block < last; ++block) {
      for (int64_t row = 0; row < rows; ++row) words[row] = block_of(received, row * blocks + block, lanes).words;
      uint32_t* const to = out + block * lanes;
      vote(lanes, static_cast<uint32_t>(rows), share, words.data(), key.of_block(first_block + block), key, to,
           carry != nullptr ? carry + block * block_size : nullptr);
      clear_padding(to, lengths[block], lanes);
    }
  });
}

EXPORT void onebit_apply_votes(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const Spans* spans,
                               const uint32_t* words, const uint32_t* live, const float* decay, const float* lr) {
  const int64_t lanes = block_size / kPlanes;
  for_each_run(threads, block_size, blocks, lengths, spans, block_size, [&](int64_t block, const Run& run, float* staged) {
    update_run(run, block_size, staged, [&](float* x) INLINED {
      apply_votes(lanes, decay[run.first_block], lr[block], words + block * lanes, live + block * lanes, x);
    });
  });
}
