// The CUDA kernels: the same bits as reference.py, at the speed of memory.
//
// reference.py documents and defines what each kernel computes; this file only says how. No header is included, so that NVRTC
// compiles it as it stands. cuda.py compiles it, fills the arguments in and launches; the tests also compile it with a C++
// compiler and run it on the CPU (tests/cuda_shim), so everything device-specific is kept to what that shim knows: the thread and
// block indices, __syncthreads, dynamic shared memory, and the correctly rounded operations below.
//
// Rules that keep the bits equal to the reference:
//   * every operation is one IEEE fp32 operation, written as add, sub, mul, div or root; the build forbids contraction as well;
//   * sums follow the lanes: lane j adds planes k = 0 .. 31 in turn, then lanes are folded in halves (fold_lanes);
//   * an element's padding (index >= the block's valid length) never takes part in anything.
//
// The shape of a launch: blockDim = (T, G), T = min(W, 256) threads for each of G compression blocks, W = block_size / 32 lanes;
// blocks = gridDim.x * G or a few more (the surplus groups only keep the barriers company). Two layouts occur:
//   * a thread owns lane j and with it word j: elements k*W + j, coalesced over j, no ballot and no shuffle;
//   * "vectors" (T == W, W % 4 == 0): a thread owns 4 lanes and every 4th plane, so that it loads and stores 16 bytes at once:
//     elements 4*t + 4*W*c + v for c = 0 .. 7, v = 0 .. 3, which are lanes 4*t % W + v of planes 4*t / W + 4*c.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define MEMBER __device__ __forceinline__
#define DEVICE static MEMBER
// The number is a bound on registers: with fewer, more threads share a multiprocessor; too few, and some would live in memory.
#define KERNEL extern "C" __global__ void __launch_bounds__(256, 1)
#define KERNEL_128 extern "C" __global__ void __launch_bounds__(256, 2)
#define KERNEL_84 extern "C" __global__ void __launch_bounds__(256, 3)

static const int kPlanes = 32;
static const int kChunks = 8;  // 16-byte vectors of a thread: 32 planes * W lanes / (W threads * 4 elements)
static const u32 kSign = 0x80000000u;
static const int kStatsThreads = 256;
static const int kRowsAtOnce = 8;  // of several ranks' bits and scales

extern __shared__ float4 shared_memory[];

// ----- arithmetic: one rounding per operation ---------------------------------------------------------------------------------

DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float root(float a) { return __fsqrt_rn(a); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }

// x with its sign changed where bit `plane` of `word` is set
DEVICE float flip(float x, u32 word, int plane) { return as_float(bits_of(x) ^ ((word << (kPlanes - 1 - plane)) & kSign)); }
// s (>= 0) with the sign of y
DEVICE float with_sign_of(float s, float y) { return as_float(bits_of(s) | (bits_of(y) & kSign)); }

// body(0) .. body(N - 1), unrolled: an index into registers must be known to the compiler.
template <int N, class Body> DEVICE void each(const Body& body) {
#pragma unroll
  for (int i = 0; i < N; ++i) body(i);
}

// ----- memory -----------------------------------------------------------------------------------------------------------------

// An address from a table in memory: the compiler cannot see that it is global, and would use slower, generic accesses.
DEVICE char* global_pointer(u64 address) { return static_cast<char*>(__cvta_global_to_generic(address)); }

DEVICE bool aligned(const void* p, int bytes) { return (reinterpret_cast<u64>(p) & (bytes - 1)) == 0; }

DEVICE void load4(float* v, const float* p) {  // v: registers
  const float4 x = *reinterpret_cast<const float4*>(p);
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}
DEVICE void store4(float* p, const float* v) {
  float4 x;
  x.x = v[0], x.y = v[1], x.z = v[2], x.w = v[3];
  *reinterpret_cast<float4*>(p) = x;
}
DEVICE void load_words4(u32 (&w)[4], const u32* p) {
  if (aligned(p, 16)) {
    const uint4 x = *reinterpret_cast<const uint4*>(p);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
  } else {  // the words follow the scales, of which there may be any number
    w[0] = p[0], w[1] = p[1], w[2] = p[2], w[3] = p[3];
  }
}

// ----- 16-bit floats ----------------------------------------------------------------------------------------------------------

enum Dtype { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

DEVICE float bfloat_to_float(u32 b) { return as_float(b << 16); }

DEVICE float half_to_float(u32 h) {
  // exact for every half, denormals included: rebias the exponent by a multiplication with a power of two
  const float scaled = mul(as_float((h & 0x7fffu) << 13), as_float(0x77800000u));  // 2^112
  const u32 special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;                 // inf and NaN keep their mantissa
  return as_float(bits_of(scaled) | special | (h & 0x8000u) << 16);
}

DEVICE u16 float_to_bfloat(float x) {  // to nearest, ties to even
  const u32 u = bits_of(x);
  if ((u & ~kSign) > 0x7f800000u) return 0x7fc0;
  return static_cast<u16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// An element of state: a float, or this in half the memory. For residuals, which are written too, kernels take its type as a template's
// argument E; reciprocal denominators, which are only read, say what they are (Reciprocals).
struct Bfloat {
  u16 bits;
};

DEVICE float value(float x) { return x; }
DEVICE float value(Bfloat x) { return bfloat_to_float(x.bits); }
DEVICE void store(float* p, float x) { *p = x; }
DEVICE void store(Bfloat* p, float x) { p->bits = float_to_bfloat(x); }

DEVICE void load4(float* v, const Bfloat* p) {
  const uint2 x = *reinterpret_cast<const uint2*>(p);
  v[0] = as_float(x.x << 16), v[1] = as_float(x.x & 0xffff0000u);
  v[2] = as_float(x.y << 16), v[3] = as_float(x.y & 0xffff0000u);
}
DEVICE void store4(Bfloat* p, const float* v) {
  uint2 x;
  x.x = float_to_bfloat(v[0]) | static_cast<u32>(float_to_bfloat(v[1])) << 16;
  x.y = float_to_bfloat(v[2]) | static_cast<u32>(float_to_bfloat(v[3])) << 16;
  *reinterpret_cast<uint2*>(p) = x;
}

// The reciprocal denominators of one block, fp32 or bf16; `there` is false where there are none.
struct Reciprocals {
  const char* at;
  bool there, narrow;

  MEMBER float one(int i) const {
    return narrow ? value(reinterpret_cast<const Bfloat*>(at)[i]) : reinterpret_cast<const float*>(at)[i];
  }
  MEMBER void four(float* v, int i) const {  // where `wide()` holds
    if (narrow)
      load4(v, reinterpret_cast<const Bfloat*>(at) + i);
    else
      load4(v, reinterpret_cast<const float*>(at) + i);
  }
  MEMBER bool wide() const { return aligned(at, narrow ? 8 : 16); }
};

DEVICE Reciprocals reciprocals_of_block(const void* r, i64 dtype, int block, i64 block_size) {
  const bool narrow = dtype == kBfloat16;
  return {static_cast<const char*>(r) + block * block_size * (narrow ? 2 : 4), r != nullptr, narrow};
}

DEVICE float widen(u32 x, int dtype) { return dtype == kBfloat16 ? bfloat_to_float(x) : half_to_float(x); }

DEVICE float load1(const char* base, int dtype, int i) {
  if (dtype == kFloat32) return reinterpret_cast<const float*>(base)[i];
  return widen(reinterpret_cast<const u16*>(base)[i], dtype);
}

// ----- which thread does what -------------------------------------------------------------------------------------------------

struct Here {
  int t, T;   // thread and number of threads of this compression block
  int group;  // number of the compression block within the thread block
  int block;  // number of the compression block
  int lanes;  // W
  bool live;  // false: no such block; the thread only keeps the barriers company
};

DEVICE Here here(i64 block_size, i64 blocks) {
  const i64 block = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool live = block < blocks;
  const int t = threadIdx.x, T = blockDim.x, group = threadIdx.y, lanes = static_cast<int>(block_size) / kPlanes;
  return {t, T, group, static_cast<int>(live ? block : 0), lanes, live};
}

DEVICE bool vectors(const Here& h) { return h.T == h.lanes && h.lanes % 4 == 0; }

struct Vectors {  // the thread's elements in the vector layout
  int first, step, lane, plane;
  DEVICE Vectors of(const Here& h) { return {4 * h.t, 4 * h.lanes, 4 * h.t % h.lanes, 4 * h.t / h.lanes}; }
  MEMBER int at(int c) const { return first + step * c; }
  MEMBER int plane_of(int c) const { return plane + 4 * c; }
};

// ----- payloads ---------------------------------------------------------------------------------------------------------------

struct Bits {
  float* scale;  // null without scales
  u32* words;
};

DEVICE Bits bits_of_block(char* raw, i64 stride, i64 per_row, int block, int lanes, bool scales = true) {
  const u32 row = static_cast<u32>(block) / static_cast<u32>(per_row);
  const i64 column = static_cast<u32>(block) % static_cast<u32>(per_row);
  char* start = raw + row * stride;
  return {scales ? reinterpret_cast<float*>(start) + column : nullptr,
          reinterpret_cast<u32*>(start + (scales ? per_row * 4 : 0)) + column * lanes};
}

// ----- spans: runs of elements of parameters and gradients, where torch put them ----------------------------------------------

struct Span {
  u64 address;  // 0: no tensor
  int first_block;
  int dtype;
};

struct Run {  // the elements of one block that a span holds
  bool held;   // whether there is a tensor
  char* data;  // only then an address; never merged with a null pointer, which would hide that it is global
  int dtype;
  int first_block;  // of the span
};

// `spans` has at least one entry.
DEVICE Run run_of_block(const int* block_span, const Span* spans, int block, i64 block_size) {
  const int index = block_span[block];
  const Span span = spans[index < 0 ? 0 : index];
  const i64 offset = (block - span.first_block) * block_size * (span.dtype == kFloat32 ? 4 : 2);
  return {index >= 0 && span.address != 0, global_pointer(span.address + offset), span.dtype, span.first_block};
}

// The elements of one block of a flat tensor, which may be null
DEVICE Run flat_run(const float* flat, int block, i64 block_size) {
  return {flat != nullptr, reinterpret_cast<char*>(const_cast<float*>(flat + block * block_size)), kFloat32, block};
}

// Four 16-bit values into the low halves of v
DEVICE void load_halves4(float* v, const char* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  v[0] = as_float(raw.x & 0xffffu), v[1] = as_float(raw.x >> 16);
  v[2] = as_float(raw.y & 0xffffu), v[3] = as_float(raw.y >> 16);
}

// Widens 16-bit values that wait in the low halves of v; one branch for all, not one for each.
template <int N> DEVICE void widen_all(float (&v)[N], int dtype) {
  if (dtype == kBfloat16) {
    each<N>([&](int q) { v[q] = bfloat_to_float(bits_of(v[q])); });
  } else {
    each<N>([&](int q) { v[q] = half_to_float(bits_of(v[q])); });
  }
}

// Elements index(0) .. index(N-1) of a run; 0 past `length` and where there is no tensor. All loads are issued before any is used.
template <int N, class Index> DEVICE void load_each(float (&v)[N], const Run& run, int length, const Index& index) {
  if (run.held && run.dtype == kFloat32) {
    each<N>([&](int q) { v[q] = index(q) < length ? reinterpret_cast<const float*>(run.data)[index(q)] : 0.0f; });
  } else if (run.held) {
    each<N>([&](int q) {
      v[q] = as_float(index(q) < length ? reinterpret_cast<const u16*>(run.data)[index(q)] : 0u);
    });
    widen_all(v, run.dtype);
  } else {
    each<N>([&](int q) { v[q] = 0.0f; });
  }
}

// Planes plane .. plane+P-1 of a lane of a run
template <int P> DEVICE void load_planes(float (&v)[P], const Run& run, int length, int lanes, int lane, int plane) {
  load_each(v, run, length, [=](int q) { return (plane + q) * lanes + lane; });
}

// A run in the vector layout: element q of vector c is v[4*c + q]
DEVICE void load_vectors(float (&v)[4 * kChunks], const Run& run, const Vectors& at, int length, int block_size) {
  const bool full = run.held && length == block_size;
  if (full && run.dtype == kFloat32 && aligned(run.data, 16)) {
    each<kChunks>([&](int c) { load4(v + 4 * c, reinterpret_cast<const float*>(run.data) + at.at(c)); });
  } else if (full && run.dtype != kFloat32 && aligned(run.data, 8)) {
    each<kChunks>([&](int c) { load_halves4(v + 4 * c, run.data + 2 * at.at(c)); });
    widen_all(v, run.dtype);
  } else {
    load_each(v, run, length, [=](int q) { return at.at(q / 4) + q % 4; });
  }
}

// ----- sums in the fixed order ------------------------------------------------------------------------------------------------

struct Sum {
  static MEMBER float of(float a, float b) { return add(a, b); }
};
struct Largest {  // a NaN is above all
  static MEMBER float of(float a, float b) { return b > a || b != b ? b : a; }
};

// Folds acc[0 .. lanes) into acc[0]: the upper half on the lower until one is left. Every thread of the thread block must call it.
template <class Of = Sum> DEVICE void fold_lanes(float* acc, const Here& h) {
  for (int width = h.lanes; width > 1;) {
    const int half = (width + 1) / 2;
    __syncthreads();
    for (int i = h.t; i < width - half; i += h.T) acc[i] = Of::of(acc[i], acc[half + i]);
    width = half;
  }
  __syncthreads();
}

// `arrays` accumulators of W lanes for this compression block: in shared memory, or in `scratch` where W is too large for that
DEVICE float* accumulators(const Here& h, char* scratch, int arrays) {
  const i64 size = static_cast<i64>(arrays) * h.lanes;
  if (scratch == nullptr) return reinterpret_cast<float*>(shared_memory) + h.group * size;
  return reinterpret_cast<float*>(scratch) + (static_cast<i64>(blockIdx.x) * blockDim.y + h.group) * size;
}

DEVICE float scale_of(float sum, int length) { return length > 0 ? root(div(sum, static_cast<float>(length))) : 0.0f; }

// ----- compress and reduce: bits, scale and residual --------------------------------------------------------------------------

// A maker has `template <int P> void planes(float (&y)[P], int lane, int plane)`: y of planes plane .. plane+P-1 of a lane.

// y of planes plane .. plane+P-1 of a lane, 0 on padding; squares are added to `sum`, signs to `word`, and keep(i, y) is called.
template <int P, class Maker, class Keep>
DEVICE void make_planes(float (&y)[P], const Maker& maker, const Here& h, int length, int lane, int plane, float& sum, u32& word,
                        const Keep& keep) {
  if (h.live) maker.template planes<P>(y, lane, plane);
#pragma unroll
  for (int q = 0; q < P; ++q) {
    const int i = (plane + q) * h.lanes + lane;
    if (!h.live || i >= length) y[q] = 0.0f;
    sum = add(sum, mul(y[q], y[q]));
    word |= (bits_of(y[q]) >> 31) << (plane + q);
    keep(i, y[q]);
  }
}

// y - C(y), 0 on padding
DEVICE float rest_of(float y, float scale, int i, int length) { return i < length ? sub(y, with_sign_of(scale, y)) : 0.0f; }

// One lane per thread, all planes in registers.
template <class Maker, class E>
DEVICE void quantize_registers(const Maker& maker, const Here& h, int length, E* residual, const Bits& out, float* acc) {
  float y[kPlanes], sum = 0.0f;
  u32 word = 0;
  make_planes(y, maker, h, length, h.t, 0, sum, word, [](int, float) {});
  acc[h.t] = sum;
  if (h.live) out.words[h.t] = word;
  fold_lanes(acc, h);
  const float scale = scale_of(acc[0], length);
  if (!h.live) return;
  if (h.t == 0) *out.scale = scale;
  each<kPlanes>([&](int k) { store(residual + k * h.lanes + h.t, rest_of(y[k], scale, k * h.lanes + h.t, length)); });
}

// Any number of lanes per thread: y waits in the memory of the residual that is written.
template <class Maker>
DEVICE void quantize_staged(const Maker& maker, const Here& h, int length, float* residual, const Bits& out, float* acc) {
  const int part = 8;
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    float sum = 0.0f;
    u32 word = 0;
    for (int k = 0; k < kPlanes; k += part) {
      float y[part];
      make_planes(y, maker, h, length, lane, k, sum, word, [&](int i, float v) {
        if (h.live) residual[i] = v;
      });
    }
    acc[lane] = sum;
    if (h.live) out.words[lane] = word;
  }
  fold_lanes(acc, h);
  const float scale = scale_of(acc[0], length);
  if (!h.live) return;
  if (h.t == 0) *out.scale = scale;
  for (int lane = h.t; lane < h.lanes; lane += h.T)
#pragma unroll 8
    for (int k = 0; k < kPlanes; ++k) {
      const int i = k * h.lanes + lane;
      residual[i] = rest_of(residual[i], scale, i, length);
    }
}

// The same where the residual has no room for y: it is made twice, the second time from what the first has left in the cache. (The residual
// that enters may be the one that is written: an element is read before it is.)
template <class Maker>
DEVICE void quantize_staged(const Maker& maker, const Here& h, int length, Bfloat* residual, const Bits& out, float* acc) {
  const int part = 8;
  float scale = 0.0f;
#pragma unroll 1  // one copy of the maker's code
  for (int pass = 0; pass < 2; ++pass) {
    for (int lane = h.t; lane < h.lanes; lane += h.T) {
      float sum = 0.0f;
      u32 word = 0;
      for (int k = 0; k < kPlanes; k += part) {
        float y[part];
        make_planes(y, maker, h, length, lane, k, sum, word, [&](int i, float v) {
          if (pass && h.live) store(residual + i, rest_of(v, scale, i, length));
        });
      }
      if (pass) continue;
      acc[lane] = sum;
      if (h.live) out.words[lane] = word;
    }
    if (pass) return;
    fold_lanes(acc, h);
    scale = scale_of(acc[0], length);
    if (h.live && h.t == 0) *out.scale = scale;
  }
}

template <class Maker, class E>
DEVICE void quantize(const Maker& maker, const Here& h, int length, E* residual, const Bits& out, float* acc) {
  if (h.T == h.lanes)
    quantize_registers(maker, h, length, residual, out, acc);
  else
    quantize_staged(maker, h, length, residual, out, acc);
}

enum Momentum { kNone, kFlat, kPacked };

// y = ((a*m) + ((b*g)*r)) + e ; a missing term is +0.0, a missing r is 1
template <int M, class E> struct Worker {
  int lanes, length;
  float a, b;           // a: its product with the scale where m is packed, since a * -s == -(a * s)
  const float* m;       // kFlat
  const u32* m_words;   // kPacked
  Run g;                // fp32 where it is flat
  Reciprocals r;        // may be absent
  const E* e;

  template <int P> MEMBER void planes(float (&y)[P], int lane, int plane) const {
    float kept[P], moment[P], weight[P];
    each<P>([&](int q) { kept[q] = value(e[(plane + q) * lanes + lane]); });
    each<P>([&](int q) { weight[q] = r.there ? r.one((plane + q) * lanes + lane) : 1.0f; });
    if (M == kFlat) {
      each<P>([&](int q) { moment[q] = m[(plane + q) * lanes + lane]; });
    }
    load_planes(y, g, length, lanes, lane, plane);
    const u32 word = M == kPacked ? m_words[lane] : 0u;
    each<P>([&](int q) {
      const float am = M == kNone ? 0.0f : M == kFlat ? mul(a, moment[q]) : flip(a, word, plane + q);
      y[q] = add(add(am, mul(mul(b, y[q]), weight[q])), kept[q]);
    });
  }
};

struct CompressArguments {
  i64 block_size, blocks;
  const int* lengths;
  const float* a;
  const float* m;
  char* m_raw;
  i64 m_stride, m_per_row;
  const float* b;
  const float* g;
  const int* block_span;
  const Span* spans;
  const void* r;
  i64 r_dtype;
  const void* e;  // the residual that enters
  void* e_new;    // the one that is written; may be the same
  char* out_raw;
  i64 out_stride, out_per_row;
};

template <class E> DEVICE const E* residual_of_block(const void* e, int block, i64 block_size) {
  return static_cast<const E*>(e) + block * block_size;
}
template <class E> DEVICE E* residual_of_block(void* e, int block, i64 block_size) { return static_cast<E*>(e) + block * block_size; }

template <int M, class E> DEVICE Worker<M, E> worker_of(const CompressArguments& x, const Here& h) {
  Worker<M, E> w;
  w.lanes = h.lanes;
  w.length = x.lengths[h.block];
  w.a = M == kNone ? 0.0f : x.a[h.block];
  w.m = M == kFlat ? x.m + h.block * x.block_size : nullptr;
  w.m_words = nullptr;
  if (M == kPacked) {
    const Bits old = bits_of_block(x.m_raw, x.m_stride, x.m_per_row, h.block, h.lanes);
    w.m_words = old.words;
    w.a = mul(w.a, *old.scale);
  }
  w.g = x.spans != nullptr ? run_of_block(x.block_span, x.spans, h.block, x.block_size) : flat_run(x.g, h.block, x.block_size);
  w.b = x.b != nullptr ? x.b[h.block] : 0.0f;
  w.r = reciprocals_of_block(x.r, x.r_dtype, h.block, x.block_size);
  w.e = residual_of_block<E>(x.e, h.block, x.block_size);
  return w;
}

template <int M, class E> DEVICE void compress(const CompressArguments& x, char* scratch) {
  const Here h = here(x.block_size, x.blocks);
  const Worker<M, E> w = worker_of<M, E>(x, h);
  const Bits out = bits_of_block(x.out_raw, x.out_stride, x.out_per_row, h.block, h.lanes);
  E* residual = residual_of_block<E>(x.e_new, h.block, x.block_size);
  quantize_staged(w, h, w.length, residual, out, accumulators(h, scratch, 1));
}

// The same with 16-byte loads and stores (8 bytes of 16-bit values). Squares must be added in the order of the planes, which the vector layout deals to
// several threads; so y goes through shared memory to a layout in which a thread owns a lane. With a flat momentum, which only the first compressed
// steps have, there are no registers left for r: such a call takes compress(). Nor are there for a choice of r's type, which is D here.
template <int M, class E, class D> DEVICE void compress_vectors(const CompressArguments& x) {
  const Here h = here(x.block_size, x.blocks);
  const Vectors at = Vectors::of(h);
  const Worker<M, E> w = worker_of<M, E>(x, h);
  const Bits out = bits_of_block(x.out_raw, x.out_stride, x.out_per_row, h.block, h.lanes);
  float* staged = reinterpret_cast<float*>(shared_memory) + h.group * (kPlanes + 1) * h.lanes;
  float* acc = staged + kPlanes * h.lanes;
  E* residual = residual_of_block<E>(x.e_new, h.block, x.block_size);
  float y[4 * kChunks], kept[4 * kChunks];
  if (h.live) {
    u32 words[4] = {0u, 0u, 0u, 0u};
    each<kChunks>([&](int c) { load4(kept + 4 * c, w.e + at.at(c)); });
    if (M == kPacked) load_words4(words, w.m_words + at.lane);
    load_vectors(y, w.g, at, w.length, kPlanes * h.lanes);
    each<kChunks>([&](int c) {
      float moment[4] = {0.0f, 0.0f, 0.0f, 0.0f}, weight[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      if (M == kFlat) load4(moment, w.m + at.at(c));
      if (M != kFlat && w.r.there) load4(weight, reinterpret_cast<const D*>(w.r.at) + at.at(c));
      each<4>([&](int q) {
        const int i = 4 * c + q;
        const float am = M == kNone ? 0.0f : M == kFlat ? mul(w.a, moment[q]) : flip(w.a, words[q], at.plane_of(c));
        y[i] = add(add(am, mul(mul(w.b, y[i]), weight[q])), kept[i]);
        if (at.at(c) + q >= w.length) y[i] = 0.0f;
      });
      store4(staged + at.at(c), y + 4 * c);
    });
  }
  __syncthreads();
  float sum = 0.0f;
  if (h.live) {
    u32 word = 0;
    each<kPlanes>([&](int k) {
      const float v = staged[k * h.lanes + h.t];
      sum = add(sum, mul(v, v));
      word |= (bits_of(v) >> 31) << k;
    });
    out.words[h.t] = word;
  }
  acc[h.t] = sum;
  fold_lanes(acc, h);
  if (!h.live) return;
  const float scale = scale_of(acc[0], w.length);
  if (h.t == 0) *out.scale = scale;
  each<kChunks>([&](int c) {
#pragma unroll
    for (int q = 4 * c; q < 4 * c + 4; ++q)
      y[q] = at.at(c) + q % 4 < w.length ? sub(y[q], with_sign_of(scale, y[q])) : 0.0f;
    store4(residual + at.at(c), y + 4 * c);
  });
}

// z = (C_0 + C_1 + ...) * inv_n + d
template <class E> struct Server {
  char* raw;
  i64 stride, per_row, rows;
  int block, lanes;
  float inv_n;
  const E* d;

  template <int P> MEMBER void planes(float (&y)[P], int lane, int plane) const {
    const int count = static_cast<int>(rows);
    // the first rows are on their way together with the residual, and later ones with each other: a wait for memory costs more than a row
    float kept[P], s[kRowsAtOnce];
    u32 word[kRowsAtOnce];
    load_rows(s, word, 0, lane);
#pragma unroll
    for (int q = 0; q < P; ++q) kept[q] = value(d[(plane + q) * lanes + lane]);
#pragma unroll
    for (int q = 0; q < P; ++q) y[q] = flip(s[0], word[0], plane + q);
#pragma unroll
    for (int n = 1; n < kRowsAtOnce; ++n)
      if (n < count) plus<P>(y, s[n], word[n], plane);
#pragma unroll 1
    for (int row = kRowsAtOnce; row < count; row += kRowsAtOnce) {
      load_rows(s, word, row, lane);
#pragma unroll
      for (int n = 0; n < kRowsAtOnce; ++n)
        if (row + n < count) plus<P>(y, s[n], word[n], plane);
    }
#pragma unroll
    for (int q = 0; q < P; ++q) y[q] = add(mul(y[q], inv_n), kept[q]);
  }

  MEMBER void load_rows(float (&s)[kRowsAtOnce], u32 (&word)[kRowsAtOnce], int row, int lane) const {
    const int count = static_cast<int>(rows), scale_step = static_cast<int>(stride / 4);
    const u32* from = reinterpret_cast<const u32*>(raw) + block + static_cast<i64>(row) * scale_step;
    const i64 to_word = per_row + static_cast<i64>(block) * (lanes - 1) + lane;  // from a row's scale
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n) {
      const u32* at = from + static_cast<i64>(n) * scale_step;
      s[n] = row + n < count ? as_float(at[0]) : 0.0f;
      word[n] = row + n < count ? at[to_word] : 0u;
    }
  }

  template <int P> static MEMBER void plus(float (&y)[P], float s, u32 word, int plane) {
#pragma unroll
    for (int q = 0; q < P; ++q) y[q] = add(y[q], flip(s, word, plane + q));
  }
};

// ----- entry points: the exchange ---------------------------------------------------------------------------------------------

#define COMPRESS_PARAMETERS                                                                                            \
  i64 block_size, i64 blocks, const int *lengths, const float *a, const float *m, char *m_raw, i64 m_stride,           \
      i64 m_per_row, const float *b, const float *g, const int *block_span, const Span *spans, const void *r,          \
      i64 r_dtype, const void *e, void *e_new, char *out_raw, i64 out_stride, i64 out_per_row, char *scratch
#define COMPRESS_ARGUMENTS                                                                                                 \
  {block_size, blocks, lengths, a, m, m_raw, m_stride, m_per_row, b, g, block_span, spans, r, r_dtype, e, e_new, out_raw, out_stride, out_per_row}

// m: flat (m), packed (m_raw) or neither; g: flat (g), spans (spans) or neither; r: flat or null, fp32 or bf16; e: fp32, or Bfloat where the name says so
KERNEL onebit_compress_none(COMPRESS_PARAMETERS) { compress<kNone, float>(COMPRESS_ARGUMENTS, scratch); }
KERNEL onebit_compress_flat(COMPRESS_PARAMETERS) { compress<kFlat, float>(COMPRESS_ARGUMENTS, scratch); }
KERNEL onebit_compress_packed(COMPRESS_PARAMETERS) { compress<kPacked, float>(COMPRESS_ARGUMENTS, scratch); }
KERNEL onebit_compress_none_bf16(COMPRESS_PARAMETERS) { compress<kNone, Bfloat>(COMPRESS_ARGUMENTS, scratch); }
KERNEL onebit_compress_flat_bf16(COMPRESS_PARAMETERS) { compress<kFlat, Bfloat>(COMPRESS_ARGUMENTS, scratch); }
KERNEL onebit_compress_packed_bf16(COMPRESS_PARAMETERS) { compress<kPacked, Bfloat>(COMPRESS_ARGUMENTS, scratch); }
// for W % 4 == 0, W <= 256, flats at multiples of 16 bytes and e and r at one of four elements; flat: without r; r: fp32, or bf16 where the
// name says r16
KERNEL_128 onebit_compress_vectors_none(COMPRESS_PARAMETERS) { compress_vectors<kNone, float, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_flat(COMPRESS_PARAMETERS) { compress_vectors<kFlat, float, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_packed(COMPRESS_PARAMETERS) { compress_vectors<kPacked, float, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_none_bf16(COMPRESS_PARAMETERS) { compress_vectors<kNone, Bfloat, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_flat_bf16(COMPRESS_PARAMETERS) { compress_vectors<kFlat, Bfloat, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_packed_bf16(COMPRESS_PARAMETERS) { compress_vectors<kPacked, Bfloat, float>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_packed_r16(COMPRESS_PARAMETERS) { compress_vectors<kPacked, float, Bfloat>(COMPRESS_ARGUMENTS); }
KERNEL_128 onebit_compress_vectors_packed_r16_bf16(COMPRESS_PARAMETERS) { compress_vectors<kPacked, Bfloat, Bfloat>(COMPRESS_ARGUMENTS); }

template <class E>
DEVICE void reduce(i64 block_size, i64 blocks, i64 rows, char* raw, i64 stride, const int* lengths, const E* d, E* d_new, char* out_raw,
                   i64 out_stride, float inv_n, char* scratch) {
  const Here h = here(block_size, blocks);
  E* residual = d_new + h.block * block_size;
  const Server<E> server = {raw, stride, blocks, rows, h.block, h.lanes, inv_n, d + h.block * block_size};
  const Bits out = bits_of_block(out_raw, out_stride, blocks, h.block, h.lanes);
  quantize(server, h, lengths[h.block], residual, out, accumulators(h, scratch, 1));
}

KERNEL_128 onebit_reduce(i64 block_size, i64 blocks, i64 rows, char* raw, i64 stride, const int* lengths, const float* d, float* d_new, char* out_raw,
                         i64 out_stride, float inv_n, char* scratch) {
  reduce(block_size, blocks, rows, raw, stride, lengths, d, d_new, out_raw, out_stride, inv_n, scratch);
}
KERNEL_128 onebit_reduce_bf16(i64 block_size, i64 blocks, i64 rows, char* raw, i64 stride, const int* lengths, const Bfloat* d, Bfloat* d_new,
                              char* out_raw, i64 out_stride, float inv_n, char* scratch) {
  reduce(block_size, blocks, rows, raw, stride, lengths, d, d_new, out_raw, out_stride, inv_n, scratch);
}

KERNEL onebit_unpack(i64 block_size, i64 blocks, char* raw, i64 stride, i64 per_row, const int* lengths, float* out) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Bits in = bits_of_block(raw, stride, per_row, h.block, h.lanes);
  const int length = lengths[h.block];
  const float scale = *in.scale;
  float* to = out + h.block * block_size;
  if (vectors(h) && aligned(to, 16)) {
    const Vectors at = Vectors::of(h);
    u32 words[4];
    load_words4(words, in.words + at.lane);
    each<kChunks>([&](int c) {
      float v[4];
      each<4>([&](int q) { v[q] = at.at(c) + q < length ? flip(scale, words[q], at.plane_of(c)) : 0.0f; });
      store4(to + at.at(c), v);
    });
    return;
  }
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    const u32 word = in.words[lane];
#pragma unroll 8
    for (int k = 0; k < kPlanes; ++k) {
      const int i = k * h.lanes + lane;
      to[i] = i < length ? flip(scale, word, k) : 0.0f;
    }
  }
}

// ----- entry points: from parameters to flat buckets ---------------------------------------------------------------------------

KERNEL onebit_gather(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans, float* out) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  const int length = lengths[h.block];
  float* to = out + h.block * block_size;
  if (vectors(h) && aligned(to, 16)) {
    const Vectors at = Vectors::of(h);
    float v[4 * kChunks];
    load_vectors(v, run, at, length, static_cast<int>(block_size));
    each<kChunks>([&](int c) { store4(to + at.at(c), v + 4 * c); });
    return;
  }
#pragma unroll 4
  for (int i = h.t; i < static_cast<int>(block_size); i += h.T)
    to[i] = run.held && i < length ? load1(run.data, run.dtype, i) : 0.0f;
}

// ----- entry points: gradient statistics --------------------------------------------------------------------------------------

struct Piece {  // of a tensor: one thread block's work
  u64 address;
  int count;
  int dtype;
};

// Sum of squares of each piece in fp64, where the square of any fp32 number is exact and no sum can overflow: a sum that is not
// finite means an element that is not. The order of additions depends on nothing but the count.
KERNEL onebit_grad_stats(const Piece* pieces, const int* piece_tensor, double* sums, int* broken) {
  double* acc = reinterpret_cast<double*>(shared_memory);
  const Piece piece = pieces[blockIdx.x];
  const char* base = global_pointer(piece.address);
  const int t = threadIdx.x;
  const bool wide = piece.dtype == kFloat32 ? aligned(base, 16) : aligned(base, 8);
  double sum = 0.0;
#pragma unroll 4
  for (int i = 4 * t; i < piece.count; i += 4 * kStatsThreads) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (wide && i + 4 <= piece.count) {
      if (piece.dtype == kFloat32) {
        load4(v, reinterpret_cast<const float*>(base) + i);
      } else {
        load_halves4(v, base + 2 * i);
        each<4>([&](int q) { v[q] = widen(bits_of(v[q]), piece.dtype); });
      }
    } else {
      each<4>([&](int q) {
        if (i + q < piece.count) v[q] = load1(base, piece.dtype, i + q);
      });
    }
    each<4>([&](int q) { sum = __fma_rn(static_cast<double>(v[q]), static_cast<double>(v[q]), sum); });
  }
  acc[t] = sum;
  for (int half = kStatsThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) acc[t] += acc[t + half];
  }
  if (t == 0) {
    sums[blockIdx.x] = acc[0];
    if (!(acc[0] - acc[0] == 0.0)) broken[piece_tensor[blockIdx.x]] = 1;  // pieces of a tensor write the same value
  }
}

KERNEL onebit_grad_stats_total(i64 pieces, const double* sums, i64 tensors, const int* broken, double* result) {
  double* acc = reinterpret_cast<double*>(shared_memory);
  double* count = acc + kStatsThreads;
  const int t = threadIdx.x;
  double sum = 0.0, bad = 0.0;
#pragma unroll 4
  for (i64 i = t; i < pieces; i += kStatsThreads) sum += sums[i];
  for (i64 i = t; i < tensors; i += kStatsThreads) bad += broken[i];
  acc[t] = sum;
  count[t] = bad;
  for (int half = kStatsThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) {
      acc[t] += acc[t + half];
      count[t] += count[t + half];
    }
  }
  if (t == 0) {
    result[0] = acc[0];
    result[1] = count[0];
  }
}

// ----- entry points: decompress and apply -------------------------------------------------------------------------------------

// x = rule(x, +-(step*r)) on a run; -step * r == -(step * r). Without r, where kOptional allows that, r is 1.
template <bool kOptional, class Rule>
DEVICE void apply(const Rule& rule, const Here& h, const Run& run, int length, const Bits& in, float step, const Reciprocals& reciprocal) {
  float* x = reinterpret_cast<float*>(run.data);
  const bool full = vectors(h) && length == kPlanes * h.lanes && aligned(x, 16);
  if (full && ((kOptional && !reciprocal.there) || reciprocal.wide())) {
    const Vectors at = Vectors::of(h);
    float v[kChunks][4];
    u32 words[4];
    load_words4(words, in.words + at.lane);
    each<kChunks>([&](int c) { load4(v[c], x + at.at(c)); });
    if (kOptional && !reciprocal.there) {
      each<kChunks>([&](int c) {
        each<4>([&](int q) { v[c][q] = rule(v[c][q], flip(step, words[q], at.plane_of(c))); });
        store4(x + at.at(c), v[c]);
      });
      return;
    }
    const int part = kChunks / 2;  // there are no registers for all of them at once
#pragma unroll
    for (int first = 0; first < kChunks; first += part) {
      float w[part][4];
      each<part>([&](int c) { reciprocal.four(w[c], at.at(first + c)); });
      each<part>([&](int k) {
        const int c = first + k;
        each<4>([&](int q) { v[c][q] = rule(v[c][q], flip(mul(step, w[k][q]), words[q], at.plane_of(c))); });
        store4(x + at.at(c), v[c]);
      });
    }
    return;
  }
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    const u32 word = in.words[lane];
    const int part = 8;
    for (int k = 0; k < kPlanes; k += part) {
      float v[part], w[part];
      load_planes(v, run, length, h.lanes, lane, k);
      each<part>([&](int q) { w[q] = kOptional && !reciprocal.there ? 1.0f : reciprocal.one((k + q) * h.lanes + lane); });
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        if (i < length) x[i] = rule(v[q], flip(mul(step, w[q]), word, k + q));
      });
    }
  }
}

// x = x*decay - (+-(t*r)), t = alpha*s, r may be null for 1
KERNEL_84 onebit_apply_adam(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans, char* raw,
                         i64 stride, i64 per_row, const void* r, i64 r_dtype, const float* decay, const float* alpha) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  if (!run.held) return;
  const Bits in = bits_of_block(raw, stride, per_row, h.block, h.lanes);
  const int length = lengths[h.block];
  const float keep = decay[run.first_block];  // of the span: all its blocks belong to one parameter, hence one group
  const float step = mul(alpha[h.block], *in.scale);
  const auto rule = [=](float x, float update) { return sub(mul(x, keep), update); };
  apply<true>(rule, h, run, length, in, step, reciprocals_of_block(r, r_dtype, h.block, block_size));
}

// ----- entry points: 1-bit LAMB -----------------------------------------------------------------------------------------------

// old: flat (old) or packed (old_raw). factors: rows b1, i1, b2, o2, c2, eps, alpha, wd of `blocks` each.
// result: (blocks, 3): sum of squares of up, of u, largest ratio
KERNEL_128 onebit_lamb_update(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans, char* raw,
                          i64 stride, i64 per_row, const float* old, char* old_raw, i64 old_stride, i64 old_per_row,
                          const void* r, i64 r_dtype, float* fresh, const float* factors, float* result, char* scratch) {
  const Here h = here(block_size, blocks);
  const Reciprocals reciprocal = reciprocals_of_block(r, r_dtype, h.block, block_size);
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  const int length = h.live && run.held ? lengths[h.block] : 0;
  const Bits now = bits_of_block(raw, stride, per_row, h.block, h.lanes);
  const float* f = factors + h.block;
  const float b1 = f[0], i1 = f[blocks], b2 = f[2 * blocks], o2 = f[3 * blocks], c2 = f[4 * blocks], eps = f[5 * blocks];
  const float alpha = f[6 * blocks], wd = f[7 * blocks];
  const float s = *now.scale, step = mul(alpha, s);
  float s_old = 0.0f;
  const u32* words_old = nullptr;
  if (old_raw != nullptr) {
    const Bits before = bits_of_block(old_raw, old_stride, old_per_row, h.block, h.lanes);
    s_old = *before.scale;
    words_old = before.words;
  }
  const i64 start = h.block * block_size;
  float *squares_up = accumulators(h, scratch, 3), *squares_u = squares_up + h.lanes, *largest = squares_u + h.lanes;
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    const u32 word = now.words[lane], word_old = words_old != nullptr ? words_old[lane] : 0u;
    float sum_up = 0.0f, sum_u = 0.0f, top = 0.0f;
    const int part = 8;
    for (int k = 0; k < kPlanes; k += part) {
      float x[part], w[part], moment[part], before[part];
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        const bool valid = i < length;
        x[q] = valid ? reinterpret_cast<const float*>(run.data)[i] : 0.0f;
        w[q] = valid ? reciprocal.one(i) : 0.0f;
        moment[q] = valid ? fresh[start + i] : 0.0f;
        before[q] = words_old != nullptr ? flip(s_old, word_old, k + q) : valid ? old[start + i] : 0.0f;
      });
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        if (i >= length) return;
        const float ghat = mul(sub(flip(s, word, k + q), mul(b1, before[q])), i1);
        const float learned = add(mul(b2, moment[q]), mul(o2, mul(ghat, ghat)));
        fresh[start + i] = learned;
        const float up = mul(flip(step, word, k + q), w[q]);
        const float u = add(up, mul(wd, x[q]));
        sum_up = add(sum_up, mul(up, up));
        sum_u = add(sum_u, mul(u, u));
        if (w[q] > 0.0f) top = Largest::of(top, div(1.0f, mul(w[q], add(root(mul(learned, c2)), eps))));
      });
    }
    squares_up[lane] = sum_up;
    squares_u[lane] = sum_u;
    largest[lane] = top;
  }
  fold_lanes(squares_up, h);
  fold_lanes(squares_u, h);
  fold_lanes<Largest>(largest, h);
  if (h.live && h.t == 0) {
    float* sums = result + 3 * static_cast<i64>(h.block);
    sums[0] = squares_up[0], sums[1] = squares_u[0], sums[2] = largest[0];
  }
}

// x = x - step*u, u = (+-(alpha*s))*r + wd*x
KERNEL_84 onebit_lamb_apply(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans, char* raw,
                         i64 stride, i64 per_row, const void* r, i64 r_dtype, const float* alpha, const float* wd,
                         const float* step) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  if (!run.held) return;
  const Bits in = bits_of_block(raw, stride, per_row, h.block, h.lanes);
  const int length = lengths[h.block];
  const float size = mul(alpha[h.block], *in.scale), decay = wd[run.first_block], rate = step[run.first_block];
  const auto rule = [=](float x, float update) { return sub(x, mul(rate, add(update, mul(decay, x)))); };
  apply<false>(rule, h, run, length, in, size, reciprocals_of_block(r, r_dtype, h.block, block_size));
}

// ----- entry points: 0/1 Adam -------------------------------------------------------------------------------------------------

struct LocalFactors {
  float b1, o1, lr, decay, bound;
};

// m = b1*m + o1*g ; p = lr*m ; u = u + p ; x = x*decay - clamp(p*r) ; anchor = anchor*decay
DEVICE void local_update(const LocalFactors& f, float g, float r, float& m, float& u, float& x, float& anchor) {
  m = add(mul(f.b1, m), mul(f.o1, g));
  const float p = mul(f.lr, m);
  u = add(u, p);
  // comparisons in this order let NaN through
  const float step = mul(p, r), above = step > f.bound ? f.bound : step;
  x = sub(mul(x, f.decay), above < -f.bound ? -f.bound : above);
  anchor = mul(anchor, f.decay);
}

KERNEL_84 onebit_local_step(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans,
                         const Span* gradients, float* m, float* u, const void* r, i64 r_dtype, float* anchor,
                         const float* factors) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  if (!run.held) return;
  const Run grad = run_of_block(block_span, gradients, h.block, block_size);
  const float* f = factors + run.first_block;
  const LocalFactors factor = {f[0], f[blocks], f[2 * blocks], f[3 * blocks], f[4 * blocks]};
  const int length = lengths[h.block];
  const i64 start = h.block * block_size;
  const Reciprocals reciprocal = reciprocals_of_block(r, r_dtype, h.block, block_size);
  float* x = reinterpret_cast<float*>(run.data);
  if (vectors(h) && length == static_cast<int>(block_size) && aligned(x, 16) && aligned(m + start, 16) && aligned(u + start, 16) &&
      reciprocal.wide() && aligned(anchor + start, 16)) {
    const Vectors at = Vectors::of(h);
    float vg[4 * kChunks];
    load_vectors(vg, grad, at, length, static_cast<int>(block_size));
    each<kChunks>([&](int c) {
      const int i = at.at(c);
      float vr[4], vm[4], vu[4], vx[4], va[4];
      reciprocal.four(vr, i);
      load4(vm, m + start + i);
      load4(vu, u + start + i);
      load4(vx, x + i);
      load4(va, anchor + start + i);
      each<4>([&](int q) { local_update(factor, vg[4 * c + q], vr[q], vm[q], vu[q], vx[q], va[q]); });
      store4(m + start + i, vm);
      store4(u + start + i, vu);
      store4(x + i, vx);
      store4(anchor + start + i, va);
    });
    return;
  }
#pragma unroll 2
  for (int i = h.t; i < length; i += h.T) {
    const float g = grad.held ? load1(grad.data, grad.dtype, i) : 0.0f;
    float vm = m[start + i], vu = u[start + i], vx = x[i], va = anchor[start + i];
    local_update(factor, g, reciprocal.one(i), vm, vu, vx, va);
    m[start + i] = vm;
    u[start + i] = vu;
    x[i] = vx;
    anchor[start + i] = va;
  }
}

// ----- entry points: BinSGDM (the draws are counter_rng.py's) -------------------------------------------------------------------

DEVICE u32 mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
DEVICE u32 hash_of_block(i64 block, i64 key0) { return mix(static_cast<u32>(block) ^ static_cast<u32>(key0)); }
DEVICE u32 draw_of(u32 of_block, int i, i64 key1, i64 key2) {
  return mix((of_block + static_cast<u32>(i) * 0x9e3779b9u) ^ static_cast<u32>(key1)) + static_cast<u32>(key2);
}
DEVICE float uniform(u32 h) {  // exact
  return mul(static_cast<float>(static_cast<int>(h >> 9) * 2 + 1 - (1 << 23)), 1.1920928955078125e-7f);
}

// m = b1*m + o1*g ; a = b2*a + o2*|g| (factors: rows b1, o1, b2, o2, share) ; bit: not m > a*U ; m = m + share*(m - clip(m, -a, a))
KERNEL_128 onebit_sample(i64 block_size, i64 blocks, const int* lengths, const float* factors, const float* g,
                     const int* block_span, const Span* spans, float* m, float* a, i64 key0, i64 key1, i64 key2,
                     i64 first_block, char* out_raw, i64 out_stride, i64 out_per_row) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Bits out = bits_of_block(out_raw, out_stride, out_per_row, h.block, h.lanes, false);
  const int length = lengths[h.block];
  const i64 start = h.block * block_size;
  const Run grad = spans != nullptr ? run_of_block(block_span, spans, h.block, block_size) : flat_run(g, h.block, block_size);
  const float keep = factors[h.block], take = factors[blocks + h.block];
  const float keep_size = factors[2 * blocks + h.block], take_size = factors[3 * blocks + h.block];
  const float share = factors[4 * blocks + h.block];
  const u32 seed = hash_of_block(first_block + h.block, key0);
  const int part = 8;
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    u32 word = 0;
    for (int k = 0; k < kPlanes; k += part) {
      float gradient[part], moment[part], size[part];
      each<part>([&](int q) { moment[q] = m[start + (k + q) * h.lanes + lane]; });
      each<part>([&](int q) { size[q] = a[start + (k + q) * h.lanes + lane]; });
      load_planes(gradient, grad, length, h.lanes, lane, k);
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        const float c = add(mul(keep_size, size[q]), mul(take_size, as_float(bits_of(gradient[q]) & ~kSign)));
        float vm = add(mul(keep, moment[q]), mul(take, gradient[q]));
        a[start + i] = c;
        const bool positive = vm > mul(c == 0.0f ? 1.0f : c, uniform(draw_of(seed, i, key1, key2)));
        word |= static_cast<u32>(!positive && i < length) << (k + q);
        const float magnitude = as_float(bits_of(vm) & ~kSign);
        if (share != 0.0f && magnitude > c) {
          const u32 excess = bits_of(sub(magnitude, c)) | (bits_of(vm) & kSign);
          vm = add(vm, mul(share, as_float(excess)));
        }
        m[start + i] = vm;
      });
    }
    out.words[lane] = word;
  }
}

struct VoteArguments {
  i64 rows, stride;
  const u32* words;
  int length;
  u32 seed;
  i64 key1, key2;
  u32* out;
  float share;
  float* carried;  // of the block, or null
};

// Counts of negatives live in bit planes: plane p of `count` holds bit p of the counts of a word's 32 elements. C planes hold up to
// 2^C - 1 rows.
// carried: z = (n - 2c)*share + carried ; bit: not z >= 0 ; carried = z - sign. Otherwise bit: not n - 2c > n*U
template <int C> DEVICE void vote(const VoteArguments& x, const Here& h) {
  const int rows = static_cast<int>(x.rows);
  const i64 row_step = x.stride / 4;
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    u32 count[C];
    each<C>([&](int p) { count[p] = 0u; });
#pragma unroll 1
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      u32 word[kRowsAtOnce];
      each<kRowsAtOnce>([&](int n) { word[n] = row + n < rows ? x.words[(row + n) * row_step + lane] : 0u; });
      each<kRowsAtOnce>([&](int n) {
        u32 carry = word[n];
        each<C>([&](int p) {
          const u32 both = count[p] & carry;
          count[p] ^= carry;
          carry = both;
        });
      });
    }
    u32 valid = 0;
    each<kPlanes>([&](int k) { valid |= static_cast<u32>(k * h.lanes + lane < x.length) << k; });
    u32 result = 0;
    const int part = 8;
#pragma unroll
    for (int first = 0; first < kPlanes; first += part) {
      float carried[part];
      float* at = x.carried + lane + static_cast<i64>(first) * h.lanes;
      if (x.carried != nullptr) {
        each<part>([&](int q) { carried[q] = at[q * h.lanes]; });
      }
      each<part>([&](int q) {
        const int k = first + q;
        int negatives = 0;
        each<C>([&](int p) { negatives |= static_cast<int>((count[p] >> k) & 1u) << p; });
        const int balance = rows - 2 * negatives;
        bool negative;
        if (x.carried != nullptr) {
          const float z = add(mul(static_cast<float>(balance), x.share), carried[q]);
          negative = !(z >= 0.0f);
          at[q * h.lanes] = add(z, negative ? 1.0f : -1.0f);
        } else {
          const u32 draw = draw_of(x.seed, k * h.lanes + lane, x.key1, x.key2);
          negative = !(static_cast<float>(balance) > mul(static_cast<float>(rows), uniform(draw)));
        }
        result |= static_cast<u32>(negative) << k;
      });
    }
    x.out[lane] = result & valid;
  }
}

KERNEL_128 onebit_vote(i64 block_size, i64 blocks, i64 rows, char* raw, i64 stride, const int* lengths, i64 key0,
                       i64 key1, i64 key2, i64 first_block, u32* out, float share, float* carried) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const u32* words = reinterpret_cast<const u32*>(raw) + static_cast<i64>(h.block) * h.lanes;
  u32* to = out + static_cast<i64>(h.block) * h.lanes;
  float* carry = carried != nullptr ? carried + h.block * block_size : nullptr;
  const VoteArguments x = {rows, stride, words, lengths[h.block], hash_of_block(first_block + h.block, key0), key1, key2, to, share, carry};
  if (rows < 16)
    vote<4>(x, h);
  else if (rows < 256)
    vote<8>(x, h);
  else
    vote<16>(x, h);  // up to 65,535 rows
}

// x = x*decay + lr*ubar where alive, else x*decay + 0 ; ubar = +-1 by the bits
KERNEL onebit_apply_votes(i64 block_size, i64 blocks, const int* lengths, const int* block_span, const Span* spans,
                          const u32* words, const u32* live, const float* decay, const float* lr) {
  const Here h = here(block_size, blocks);
  if (!h.live) return;
  const Run run = run_of_block(block_span, spans, h.block, block_size);
  if (!run.held) return;
  const int length = lengths[h.block];
  const float keep = decay[run.first_block], rate = lr[h.block];
  float* x = reinterpret_cast<float*>(run.data);
  for (int lane = h.t; lane < h.lanes; lane += h.T) {
    const u32 negative = words[static_cast<i64>(h.block) * h.lanes + lane];
    const u32 alive = live[static_cast<i64>(h.block) * h.lanes + lane];
    const int part = 8;
    for (int k = 0; k < kPlanes; k += part) {
      float v[part];
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        v[q] = i < length ? x[i] : 0.0f;
      });
      each<part>([&](int q) {
        const int i = (k + q) * h.lanes + lane;
        const float ubar = (negative >> (k + q)) & 1u ? -1.0f : 1.0f;
        const float delta = (alive >> (k + q)) & 1u ? mul(rate, ubar) : 0.0f;
        if (i < length) x[i] = add(mul(v[q], keep), delta);
      });
    }
  }
}
