// The CPU kernels: the same bits as reference.py, at the speed of memory.
//
// Plain C ABI, no torch headers: built in a few seconds by cpu.py and called through ctypes. reference.py documents and defines
// what each entry point computes; this file only says how. Three rules keep the bits equal to the reference:
//   * every operation is one IEEE fp32 operation (the build flags forbid contraction into fused multiply-adds);
//   * sums follow the lanes: lane j adds planes k = 0 .. 31 in turn, then lanes are folded in halves (fold_lanes);
//   * the threads divide blocks, never a block, so the number of threads changes nothing.
//
// A block of W = block_size / 32 lanes is worked on in tiles: R vectors of N lanes, all 32 planes, with the bit words and the
// partial sums of the tile in registers. What differs between kernels is only where the values come from: a "maker" object with
//   template <int N, int R> struct Tile { Tile(const Maker&, int64_t lane); F<N> value(int r, int64_t i); };
// whose value() is called once for each plane in turn (r: vector of the tile; i: first element, an index within the block).
// quantize() does the rest: bits, scale, residual. A new compressing kernel is a new maker. Tiles copy what they need: a store
// through a float pointer would otherwise make the compiler load every factor again.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if !defined(__GNUC__)
#error "the kernels use the vector extensions of GCC and Clang"
#endif
#if defined(__FAST_MATH__)
#error "the kernels need IEEE arithmetic: build without -ffast-math"
#endif

#define INLINE inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 1;
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

template <int N> struct Vec;
template <> struct Vec<1> { using F = float; using U = uint32_t; };
template <> struct Vec<4> {
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t U __attribute__((vector_size(16)));
};
template <> struct Vec<8> {
  typedef float F __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
};
template <> struct Vec<16> {
  typedef float F __attribute__((vector_size(64)));
  typedef uint32_t U __attribute__((vector_size(64)));
};
template <int N> using F = typename Vec<N>::F;
template <int N> using U = typename Vec<N>::U;

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

// Bits of N words, plane after plane, as signs.
template <int N> class Signs {
 public:
  INLINE void begin(const uint32_t* words) { word_ = load<N>(words); }
  // `magnitude` with the sign that the next plane's bit says.
  INLINE F<N> next(F<N> magnitude) {
#if defined(__AVX512F__)
    word_ = (word_ >> 1) | (word_ << 31);  // a rotation and one three-operand logic instruction
    return bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(magnitude) ^ (word_ & kSign)));
#else
    const F<N> value = bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(magnitude) ^ (word_ << 31)));
    word_ = word_ >> 1;
    return value;
#endif
  }

 private:
  U<N> word_;
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

INLINE uint16_t float_to_half(float x) {  // round to nearest, ties to even
  uint32_t u = bits_as<uint32_t>(x), sign = u & kSign;
  u ^= sign;
  uint16_t h;
  if (u > 0x7f800000u) {
    h = 0x7e00;
  } else if (u >= 0x477ff000u) {
    h = 0x7c00;
  } else if (u < 0x38800000u) {  // below the smallest normal half: let an fp32 addition round at the right place
    h = static_cast<uint16_t>(bits_as<uint32_t>(bits_as<float>(u) + 0.5f) - 0x3f000000u);
  } else {
    u += 0xfffu + ((u >> 13) & 1u) - 0x38000000u;
    h = static_cast<uint16_t>(u >> 13);
  }
  return static_cast<uint16_t>(h | sign >> 16);
}

INLINE float bfloat_to_float(uint16_t b) { return bits_as<float>(static_cast<uint32_t>(b) << 16); }

INLINE uint16_t float_to_bfloat(float x) {  // round to nearest, ties to even
  uint32_t u = bits_as<uint32_t>(x);
  if ((u & ~kSign) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

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

void from_float(const float* from, int64_t count, uint8_t dtype, void* to) {
  uint16_t* p = static_cast<uint16_t*>(to);
  int64_t i = 0;
  if (dtype == kFloat32) {
    std::memcpy(to, from, count * 4);
  } else if (dtype == kBfloat16) {
    for (; i < count; ++i) p[i] = float_to_bfloat(from[i]);
  } else {
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; ++i) p[i] = float_to_half(from[i]);
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

// Helpers of our own, for where there is no OpenMP. They sleep between jobs, and the caller works too and takes whatever a helper
// that wakes late has not taken.
class Pool {
 public:
  // Calls work(context) here and in up to `helpers` other threads; returns when all that began have returned.
  void run(int helpers, void (*work)(void*), void* context) {
    std::unique_lock<std::mutex> only(busy_, std::defer_lock);
    if (!only.try_lock()) return work(context);  // a second caller (a backward hook, say) works alone rather than waits
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(helpers_) < helpers) {
        try {
          std::thread([this, index = helpers_] { help(index); }).detach();
        } catch (const std::system_error&) {
          break;  // no more threads to be had
        }
        ++helpers_;
      }
      work_ = work;
      context_ = context;
      wanted_ = helpers;
      ++job_;
    }
    wake_.notify_all();
    work(context);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // too late to begin
    done_.wait(lock, [this] { return inside_ == 0; });
  }

 private:
  void help(int index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ != seen && index < wanted_; });
      seen = job_;
      ++inside_;
      void (*const work)(void*) = work_;
      void* const context = context_;
      lock.unlock();
      work(context);
      lock.lock();
      if (--inside_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  void (*work_)(void*) = nullptr;
  void* context_ = nullptr;
  uint64_t job_ = 0;
  int helpers_ = 0, wanted_ = 0, inside_ = 0;
};

std::atomic<bool> use_openmp{true};

// Runs work(context) in `threads` threads at once, this one included.
//
// torch's own OpenMP threads are the best team: they are awake right after backward, where threads of ours would have to share
// the cores with them. torch makes its OpenMP library's names global, so that is the one found here, whichever it is; linking
// with one at build time would bring a second. Neither OpenMP teams nor our helpers survive a fork: a child starts helpers.
void run_team(int threads, void (*work)(void*), void* context) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const Parallel openmp = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  static const pid_t loaded_by = getpid();
  if (use_openmp && openmp != nullptr && getpid() == loaded_by) return openmp(work, context, static_cast<unsigned>(threads), 0);

  static std::mutex guard;
  static Pool* pool = nullptr;  // never destroyed, so that nothing is joined at exit
  static pid_t owner = 0;
  static const int registered = pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] { guard.unlock(); });
  (void)registered;
  Pool* mine;
  {
    std::lock_guard<std::mutex> lock(guard);
    if (pool == nullptr || owner != getpid()) pool = new Pool, owner = getpid();
    mine = pool;
  }
  mine->run(threads - 1, work, context);
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

struct Payload {  // a Packed: rows of `per_row` scales, then the words
  uint8_t* raw;
  int64_t row_stride;  // bytes
  int64_t per_row;     // blocks
};

struct Block {
  float* scale;
  uint32_t* words;
};

INLINE Block block_of(const Payload& payload, int64_t block, int64_t lanes) {
  uint8_t* row = payload.raw + block / payload.per_row * payload.row_stride;
  const int64_t column = block % payload.per_row;
  return {reinterpret_cast<float*>(row) + column,
          reinterpret_cast<uint32_t*>(row + payload.per_row * 4) + column * lanes};
}

// Asks for the words of a block that comes soon: too little per block for the hardware to see a stream in.
template <bool Write> INLINE void prefetch_words(const Payload& payload, int64_t block, int64_t lanes) {
  constexpr int64_t kAhead = 2;
  const uint32_t* words = block_of(payload, block + kAhead, lanes).words;
  for (int64_t i = 0; i < lanes; i += 16) __builtin_prefetch(words + i, Write, 3);
}

struct Spans {  // in block order; blocks between and after them are padding
  int64_t count;
  const int64_t* block;        // first block
  const int64_t* numel;        // elements
  void* const* data;           // null: no tensor
  const uint8_t* dtype;
};

struct Run {  // the elements of one block that a span holds
  void* data;  // null: none
  uint8_t dtype;
  int64_t length;
  int64_t first_block;  // of the span
};

// Walks the spans along with ascending blocks.
class SpanCursor {
 public:
  SpanCursor(const Spans& spans, int64_t block_size, int64_t first) : spans_(spans), size_(block_size) {
    const int64_t* end = spans.block + spans.count;
    at_ = std::max<int64_t>(0, std::upper_bound(spans.block, end, first) - spans.block - 1);
  }
  INLINE Run at(int64_t block) {
    while (at_ + 1 < spans_.count && spans_.block[at_ + 1] <= block) ++at_;
    Run run{nullptr, kFloat32, 0, 0};
    if (at_ >= spans_.count || block < spans_.block[at_]) return run;
    const int64_t offset = (block - spans_.block[at_]) * size_;
    const int64_t left = spans_.numel[at_] - offset;
    if (left <= 0) return run;
    run.length = std::min(left, size_);
    run.dtype = spans_.dtype[at_];
    run.first_block = spans_.block[at_];
    if (spans_.data[at_] != nullptr) run.data = static_cast<char*>(spans_.data[at_]) + offset * item_size(run.dtype);
    return run;
  }

 private:
  const Spans& spans_;
  int64_t size_, at_;
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

// ----- tiles ------------------------------------------------------------------------------------------------------------

// Calls tile.run<N, R>(lane) until all lanes are covered: wide tiles first, single lanes for odd widths last.
template <class Tile> INLINE void for_each_tile(int64_t lanes, Tile&& tile) {
  int64_t lane = 0;
  constexpr int wide = kNative == 16 ? 4 : 2;  // as many vectors as leave the registers room for words and sums
  for (; lane + kNative * wide <= lanes; lane += kNative * wide) tile.template run<kNative, wide>(lane);
  for (; lane + kNative <= lanes; lane += kNative) tile.template run<kNative, 1>(lane);
  if (kNative > 4)
    for (; lane + 4 <= lanes; lane += 4) tile.template run<4, 1>(lane);
  for (; lane < lanes; ++lane) tile.template run<1, 1>(lane);
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
template <class Maker> struct FirstPass {
  const Maker& maker;
  int64_t lanes;
  int planes;  // those that hold valid elements
  float* y;
  uint32_t* words;
  float* acc;

  template <int N, int R> INLINE void run(int64_t lane) {
    typename Maker::template Tile<N, R> tile(maker, lane);
    F<N> sum[R];
    U<N> word[R];
    for (int r = 0; r < R; ++r) sum[r] = F<N>{}, word[r] = U<N>{};
    float* const to = y;
    const int64_t step = lanes, end = planes * lanes + lane;
    for (int64_t i = lane; i < end; i += step) {
      for (int r = 0; r < R; ++r) {
        const F<N> value = tile.value(r, i + r * N);
        store<N>(to + i + r * N, value);
        sum[r] = sum[r] + value * value;
        word[r] = (word[r] >> 1) | (bits_as<U<N>>(value) & kSign);  // after 32 planes, bit k is plane k
      }
    }
    const int left = kPlanes - planes;  // at most 31: a block with a valid element has a plane
    for (int r = 0; r < R; ++r) {
      store<N>(words + lane + r * N, static_cast<U<N>>(word[r] >> left));
      store<N>(acc + lane + r * N, sum[r]);
    }
  }
};

// A maker that takes y from memory: for blocks whose padding had to be cleared first.
struct FromMemory {
  const float* y;
  template <int N, int R> struct Tile {
    const float* y;
    INLINE Tile(const FromMemory& maker, int64_t) : y(maker.y) {}
    INLINE F<N> value(int, int64_t i) const { return load<N>(y + i); }
  };
};

template <int N> INLINE F<N> residual_of(F<N> y, F<N> scale) {  // y - (+-scale), the sign being that of y
  return y - bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(scale) | (bits_as<U<N>>(y) & kSign)));
}

// Bits, scale and residual of the block that `maker` makes. `y` is the memory of its residual: read by the maker, overwritten
// with y, and then, while that is still in the cache, with the residual.
//
// (Tried and slower on Zen 5, by 5 to 40 percent: merging the second pass into the next block's first one, postponing it behind
// that, a buffer for y, and prefetching the next block meanwhile. All disturb the hardware's own prefetching.)
template <class Maker>
INLINE void quantize(const Maker& maker, int64_t block_size, int64_t length, float* y, Block out, float* acc) {
  const int64_t lanes = block_size / kPlanes;
  if (length <= 0) {
    *out.scale = 0.0f;
    std::memset(out.words, 0, lanes * 4);
    std::memset(y, 0, block_size * 4);
    return;
  }
  const int planes = static_cast<int>((length + lanes - 1) / lanes);
  for_each_tile(lanes, FirstPass<Maker>{maker, lanes, planes, y, out.words, acc});
  if (length < block_size) {
    // Padding takes part in nothing. (Its y can be anything: a decoded old momentum is never 0 there.)
    std::memset(y + length, 0, (block_size - length) * 4);
    for_each_tile(lanes, FirstPass<FromMemory>{FromMemory{y}, lanes, planes, y, out.words, acc});
  }
  const float scale = std::sqrt(fold_lanes(acc, lanes) / static_cast<float>(length));
  *out.scale = scale;
  const F<kNative> wide = splat<kNative>(scale);
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kNative <= length; i += kNative) store<kNative>(y + i, residual_of<kNative>(load<kNative>(y + i), wide));
  for (; i < length; ++i) y[i] = residual_of<1>(y[i], scale);
}

// ----- compress ---------------------------------------------------------------------------------------------------------

enum class Momentum { kNone, kFlat, kPacked };

// y = ((a*m) + (b*g)) + e ; a missing term is +0.0
template <Momentum M, bool G> struct Worker {
  float a, b;
  const float* m;
  const uint32_t* m_words;
  float m_scale;
  const float* g;
  const float* e;

  template <int N, int R> struct Tile {
    const float *m, *g, *e;
    F<N> a, b;  // a: its product with the scale where m is packed, since a * -s == -(a * s)
    Signs<N> old[R];
    INLINE Tile(const Worker& w, int64_t lane) : m(w.m), g(w.g), e(w.e), a(splat<N>(w.a)), b(splat<N>(w.b)) {
      if (M == Momentum::kPacked) {
        a = splat<N>(w.a * w.m_scale);
        for (int r = 0; r < R; ++r) old[r].begin(w.m_words + lane + r * N);
      }
    }
    INLINE F<N> value(int r, int64_t i) {
      F<N> y = splat<N>(0.0f);
      if (M == Momentum::kFlat) y = a * load<N>(m + i);
      if (M == Momentum::kPacked) y = old[r].next(a);
      if (G) y = y + b * load<N>(g + i);
      else y = y + splat<N>(0.0f);
      return y + load<N>(e + i);
    }
  };
};

struct CompressArgs {
  int64_t block_size, blocks;
  const int32_t* lengths;
  const float* a;
  const float* m;
  Payload m_packed;
  const float* b;
  const float* g;
  Spans spans;
  float* e;
  Payload out;
};

template <Momentum M, bool G> void compress(int threads, const CompressArgs& x) {
  const int64_t size = x.block_size, lanes = size / kPlanes;
  parallel(threads, x.blocks, size, [&](int64_t first, int64_t last) {
    Scratch acc(lanes), staged(x.spans.data != nullptr ? size : 0);
    SpanCursor cursor(x.spans, size, first);
    for (int64_t block = first; block < last; ++block) {
      const int64_t length = x.lengths[block];
      prefetch_words<true>(x.out, block, lanes);
      Worker<M, G> worker{};
      worker.e = x.e + block * size;
      if (M != Momentum::kNone) worker.a = x.a[block];
      if (M == Momentum::kFlat) worker.m = x.m + block * size;
      if (M == Momentum::kPacked) {
        const Block old = block_of(x.m_packed, block, lanes);
        prefetch_words<false>(x.m_packed, block, lanes);
        worker.m_words = old.words;
        worker.m_scale = *old.scale;
      }
      if (G) {
        worker.b = x.b[block];
        if (x.spans.data == nullptr) {
          worker.g = x.g + block * size;
        } else {
          const Run run = cursor.at(block);
          if (run.data != nullptr && run.length == size && run.dtype == kFloat32) {
            worker.g = static_cast<const float*>(run.data);
          } else {
            const int64_t held = run.data != nullptr ? run.length : 0;
            if (held) to_float(run.data, run.dtype, held, staged);
            std::memset(staged + held, 0, (size - held) * 4);
            worker.g = staged;
          }
        }
      }
      quantize(worker, size, length, x.e + block * size, block_of(x.out, block, lanes), acc);
    }
  });
}

// ----- reduce -----------------------------------------------------------------------------------------------------------

// z = (C_0 + C_1 + ...) * inv_n + d ; Rows = 0: any number, whose words do not fit the registers
template <int Rows> struct Server {
  int rows;
  const float* scales;
  const uint32_t* const* words;
  float inv_n;
  const float* d;

  template <int N, int R> struct Tile {
    const float* d;
    F<N> inv_n, scale[Rows];
    Signs<N> signs[Rows][R];
    INLINE Tile(const Server& s, int64_t lane) : d(s.d), inv_n(splat<N>(s.inv_n)) {
      for (int row = 0; row < Rows; ++row) {
        scale[row] = splat<N>(s.scales[row]);
        for (int r = 0; r < R; ++r) signs[row][r].begin(s.words[row] + lane + r * N);
      }
    }
    INLINE F<N> value(int r, int64_t i) {
      F<N> z = signs[0][r].next(scale[0]);
      for (int row = 1; row < Rows; ++row) z = z + signs[row][r].next(scale[row]);
      return z * inv_n + load<N>(d + i);
    }
  };
};

template <> struct Server<0> {
  int rows;
  const float* scales;
  const uint32_t* const* words;
  float inv_n;
  const float* d;

  template <int N, int R> struct Tile {
    const Server& s;
    const int64_t first_lane;
    int seen = 0;  // calls: R for each plane
    INLINE Tile(const Server& server, int64_t lane) : s(server), first_lane(lane) {}
    INLINE F<N> term(int row, int r, int shift) const {
      const U<N> word = load<N>(s.words[row] + first_lane + r * N) << shift;
      return bits_as<F<N>>(static_cast<U<N>>(bits_as<U<N>>(splat<N>(s.scales[row])) ^ (word & kSign)));
    }
    INLINE F<N> value(int r, int64_t i) {
      const int shift = kPlanes - 1 - seen++ / R;  // brings the plane's bit to the sign
      F<N> z = term(0, r, shift);
      for (int row = 1; row < s.rows; ++row) z = z + term(row, r, shift);
      return z * splat<N>(s.inv_n) + load<N>(s.d + i);
    }
  };
};

template <int Rows>
void reduce(int threads, int64_t size, int rows, const Payload& received, const int32_t* lengths, float* d,
            const Payload& out, float inv_n) {
  const int64_t lanes = size / kPlanes;
  parallel(threads, received.per_row, size, [&](int64_t first, int64_t last) {
    Scratch acc(lanes), scales(rows);
    std::vector<const uint32_t*> words(rows);
    for (int64_t block = first; block < last; ++block) {
      for (int row = 0; row < rows; ++row) {
        const Block in = block_of(received, row * received.per_row + block, lanes);
        prefetch_words<false>(received, row * received.per_row + block, lanes);
        scales[row] = *in.scale;
        words[row] = in.words;
      }
      const Server<Rows> server{rows, scales, words.data(), inv_n, d + block * size};
      quantize(server, size, lengths[block], d + block * size, block_of(out, block, lanes), acc);
    }
  });
}

// ----- apply and unpack -------------------------------------------------------------------------------------------------

// x = x*decay - (+-(t*r))
struct ApplyAdam {
  int64_t lanes;
  float decay, t;
  const uint32_t* words;
  const float* r;
  float* x;

  template <int N, int R> INLINE void run(int64_t lane) {
    Signs<N> signs[R];
    for (int v = 0; v < R; ++v) signs[v].begin(words + lane + v * N);
    const F<N> factor = splat<N>(t), keep = splat<N>(decay);
    const float* const from = r;
    float* const to = x;
    const int64_t step = lanes, end = kPlanes * lanes + lane;
    for (int64_t i = lane; i < end; i += step)
      for (int v = 0; v < R; ++v) {
        const F<N> update = signs[v].next(static_cast<F<N>>(factor * load<N>(from + i + v * N)));
        store<N>(to + i + v * N, load<N>(to + i + v * N) * keep - update);
      }
  }
};

struct Unpack {
  int64_t lanes;
  float scale;
  const uint32_t* words;
  float* out;

  template <int N, int R> INLINE void run(int64_t lane) {
    Signs<N> signs[R];
    for (int v = 0; v < R; ++v) signs[v].begin(words + lane + v * N);
    const F<N> magnitude = splat<N>(scale);
    float* const to = out;
    const int64_t step = lanes, end = kPlanes * lanes + lane;
    for (int64_t i = lane; i < end; i += step)
      for (int v = 0; v < R; ++v) store<N>(to + i + v * N, signs[v].next(magnitude));
  }
};

// ----- gradient statistics ----------------------------------------------------------------------------------------------

constexpr int64_t kSumPiece = 1 << 18;

// Sum of squares in fp64, where the square of any fp32 number is exact and no sum can overflow: not finite means that an element
// is not. Fixed pieces and fixed lanes: the result does not depend on the number of threads.
//
// Four streams at once: a core that follows a single one does not have enough reads under way to use the memory's speed. (On Zen 4
// 22 GB/s against 15.6 with one stream and prefetch instructions, 20 with one stream and none.)
double sum_squares(const float* p, int64_t count) {
  constexpr int kLanes = 16, kStreams = 4;
  double acc[kStreams][kLanes] = {};
  const int64_t part = count / (kStreams * kLanes) * kLanes;
  for (int64_t i = 0; i < part; i += kLanes)
    for (int s = 0; s < kStreams; ++s)
      for (int j = 0; j < kLanes; ++j) {
        const double x = p[s * part + i + j];
        acc[s][j] += x * x;
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

EXPORT int onebit_abi() { return kAbi; }

// For measurements and tests: 0 makes the kernels use helpers of their own where they would use torch's OpenMP team.
EXPORT void onebit_use_openmp(int yes) { use_openmp = yes != 0; }

EXPORT void onebit_gather(int threads, int64_t block_size, int64_t blocks, int64_t spans, const int64_t* span_block,
                          const int64_t* span_numel, void* const* span_data, const uint8_t* span_dtype, float* out) {
  const Spans table{spans, span_block, span_numel, span_data, span_dtype};
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    SpanCursor cursor(table, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const Run run = cursor.at(block);
      const int64_t held = run.data != nullptr ? run.length : 0;
      if (held) to_float(run.data, run.dtype, held, out + block * block_size);
      std::memset(out + block * block_size + held, 0, (block_size - held) * 4);
    }
  });
}

EXPORT void onebit_scatter(int threads, int64_t block_size, int64_t blocks, int64_t spans, const int64_t* span_block,
                           const int64_t* span_numel, void* const* span_data, const uint8_t* span_dtype, const float* flat) {
  const Spans table{spans, span_block, span_numel, span_data, span_dtype};
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    SpanCursor cursor(table, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const Run run = cursor.at(block);
      if (run.data != nullptr) from_float(flat + block * block_size, run.length, run.dtype, run.data);
    }
  });
}

EXPORT void onebit_grad_stats(int threads, int64_t tensors, const int64_t* numel, const void* const* data,
                              const uint8_t* dtype, double* result) {
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
    bad += std::isfinite(sum) ? 0.0 : 1.0;
    squares += sum;
  }
  result[0] = squares;
  result[1] = bad;
}

// m: flat (m), packed (m_raw) or neither; g: flat (g), spans (span_data) or neither.
EXPORT void onebit_compress(int threads, int64_t block_size, int64_t blocks, const int32_t* lengths, const float* a,
                            const float* m, uint8_t* m_raw, int64_t m_stride, int64_t m_per_row, const float* b,
                            const float* g, int64_t spans, const int64_t* span_block, const int64_t* span_numel,
                            void* const* span_data, const uint8_t* span_dtype, float* e, uint8_t* out_raw,
                            int64_t out_stride, int64_t out_per_row) {
  const CompressArgs x{block_size, blocks, lengths, a, m, {m_raw, m_stride, m_per_row}, b, g,
                       {spans, span_block, span_numel, span_data, span_dtype}, e, {out_raw, out_stride, out_per_row}};
  const bool gradient = g != nullptr || span_data != nullptr;
  if (m != nullptr)
    gradient ? compress<Momentum::kFlat, true>(threads, x) : compress<Momentum::kFlat, false>(threads, x);
  else if (m_raw != nullptr)
    gradient ? compress<Momentum::kPacked, true>(threads, x) : compress<Momentum::kPacked, false>(threads, x);
  else
    gradient ? compress<Momentum::kNone, true>(threads, x) : compress<Momentum::kNone, false>(threads, x);
}

EXPORT void onebit_reduce(int threads, int64_t block_size, int rows, uint8_t* in_raw, int64_t in_stride, int64_t per_row,
                          const int32_t* lengths, float* d, uint8_t* out_raw, int64_t out_stride, float inv_n) {
  const Payload received{in_raw, in_stride, per_row}, out{out_raw, out_stride, per_row};
  switch (rows) {
    case 1: return reduce<1>(threads, block_size, rows, received, lengths, d, out, inv_n);
    case 2: return reduce<2>(threads, block_size, rows, received, lengths, d, out, inv_n);
    case 3: return reduce<3>(threads, block_size, rows, received, lengths, d, out, inv_n);
    case 4: return reduce<4>(threads, block_size, rows, received, lengths, d, out, inv_n);
    default: return reduce<0>(threads, block_size, rows, received, lengths, d, out, inv_n);
  }
}

EXPORT void onebit_unpack(int threads, int64_t block_size, int64_t blocks, uint8_t* raw, int64_t stride, int64_t per_row,
                          const int32_t* lengths, float* out) {
  const Payload packed{raw, stride, per_row};
  const int64_t lanes = block_size / kPlanes;
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      float* to = out + block * block_size;
      const int64_t length = std::max<int64_t>(0, lengths[block]);
      if (length) {
        const Block in = block_of(packed, block, lanes);
        for_each_tile(lanes, Unpack{lanes, *in.scale, in.words, to});
      }
      std::memset(to + length, 0, (block_size - length) * 4);
    }
  });
}

EXPORT void onebit_apply_adam(int threads, int64_t block_size, int64_t blocks, int64_t spans, const int64_t* span_block,
                              const int64_t* span_numel, void* const* span_data, const uint8_t* span_dtype, uint8_t* raw,
                              int64_t stride, int64_t per_row, const float* r, const float* decay, const float* alpha) {
  const Spans table{spans, span_block, span_numel, span_data, span_dtype};
  const Payload packed{raw, stride, per_row};
  const int64_t lanes = block_size / kPlanes;
  parallel(threads, blocks, block_size, [&](int64_t first, int64_t last) {
    Scratch staged(block_size);
    SpanCursor cursor(table, block_size, first);
    for (int64_t block = first; block < last; ++block) {
      const Run run = cursor.at(block);
      if (run.data == nullptr) continue;
      const Block in = block_of(packed, block, lanes);
      prefetch_words<false>(packed, block, lanes);
      // every block of a span belongs to one parameter, hence one group, hence one decay
      ApplyAdam apply{lanes, decay[run.first_block], alpha[block] * *in.scale, in.words, r + block * block_size,
                      static_cast<float*>(run.data)};
      if (run.length == block_size) {
        for_each_tile(lanes, apply);
      } else {
        std::memcpy(staged, run.data, run.length * 4);
        std::memset(staged + run.length, 0, (block_size - run.length) * 4);
        apply.x = staged;
        for_each_tile(lanes, apply);
        std::memcpy(run.data, staged, run.length * 4);
      }
    }
  });
}
