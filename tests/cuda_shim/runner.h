// Included after the text of onebit.cu: runs a kernel by name, as cuLaunchKernel would.

namespace shim {

constexpr size_t kStack = 64 * 1024;

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  Dim3 index;
  bool finished;
};

static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static Fibre* running = nullptr;
static void (*body)(void**) = nullptr;
static void** arguments = nullptr;
static std::string problem;

static void enter() {
  body(arguments);
  running->finished = true;
  swapcontext(&running->context, &scheduler);
}

static void resume(Fibre& fibre) {
  running = &fibre;
  threadIdx = fibre.index;
  swapcontext(&scheduler, &fibre.context);
}

// 0: forward, 1: backward, others: shuffled, another way at each barrier
static void put_in_order(std::vector<int>& order, int how, uint32_t& state) {
  const int count = static_cast<int>(order.size());
  for (int i = 0; i < count; ++i) order[i] = how == 1 ? count - 1 - i : i;
  if (how < 2) return;
  for (int i = count - 1; i > 0; --i) {
    state = state * 1664525u + 1013904223u;
    std::swap(order[i], order[(state >> 8) % (i + 1)]);
  }
}

static bool run_block(int threads, size_t shared, int how, uint32_t& state) {
  std::memset(shared_memory, 0xff, shared);
  std::memset(reinterpret_cast<char*>(shared_memory) + shared, 0xa5, kShimGuard);
  if (fibres.size() < static_cast<size_t>(threads)) fibres.resize(threads);
  for (int t = 0; t < threads; ++t) {
    Fibre& fibre = fibres[t];
    fibre.index = {t % blockDim.x, t / blockDim.x, 0};
    fibre.finished = false;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.data();
    fibre.context.uc_stack.ss_size = fibre.stack.size();
    fibre.context.uc_link = nullptr;
    makecontext(&fibre.context, enter, 0);
  }
  std::vector<int> order(threads);
  for (int finished = 0; finished < threads;) {
    if (finished) {
      problem = "a thread waits at a barrier that others have passed by";
      return false;
    }
    put_in_order(order, how, state);
    for (int t : order) {
      resume(fibres[t]);
      finished += fibres[t].finished;
    }
  }
  for (size_t i = shared; i < shared + kShimGuard; ++i)
    if (reinterpret_cast<unsigned char*>(shared_memory)[i] != 0xa5) {
      problem = "a thread wrote past the shared memory of " + std::to_string(shared) + " bytes";
      return false;
    }
  return true;
}

template <class... A, size_t... I> void call(void (*kernel)(A...), void** slots, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<A>*>(slots[I])...);
}

struct Kernel {
  const char* name;
  size_t parameters;
  void (*run)(void**);
};

template <class... A> constexpr size_t parameters_of(void (*)(A...)) { return sizeof...(A); }
template <class... A> void run_with(void (*kernel)(A...), void** slots) { call(kernel, slots, std::index_sequence_for<A...>{}); }

}  // namespace shim

void __syncthreads() { swapcontext(&shim::running->context, &shim::scheduler); }

#define SHIM_KERNEL(name) {#name, shim::parameters_of(&name), [](void** slots) { shim::run_with(&name, slots); }},

static const shim::Kernel shim_kernels[] = {
#include SHIM_KERNELS
};

extern "C" const char* shim_launch(const char* name, int grid, int threads_x, int threads_y, int64_t shared, void** slots,
                                   int64_t count, int how) {
  using namespace shim;
  problem.clear();
  const Kernel* kernel = nullptr;
  for (const Kernel& k : shim_kernels)
    if (std::strcmp(k.name, name) == 0) kernel = &k;
  if (kernel == nullptr) return "there is no such kernel";
  if (kernel->parameters != static_cast<size_t>(count)) {
    problem = "the kernel takes " + std::to_string(kernel->parameters) + " arguments, not " + std::to_string(count);
    return problem.c_str();
  }
  if (threads_x * threads_y > 256 || threads_x * threads_y < 1 || grid < 1) return "impossible shape of a launch";
  if (shared < 0 || static_cast<size_t>(shared) > kShimShared) return "more shared memory than every device has";
  body = kernel->run;
  arguments = slots;
  blockDim = {static_cast<unsigned>(threads_x), static_cast<unsigned>(threads_y), 1};
  gridDim = {static_cast<unsigned>(grid), 1, 1};
  uint32_t state = 12345u + static_cast<uint32_t>(how);
  for (int i = 0; i < grid; ++i) {
    blockIdx = {static_cast<unsigned>(how == 1 ? grid - 1 - i : i), 0, 0};
    if (!run_block(threads_x * threads_y, static_cast<size_t>(shared), how, state)) return problem.c_str();
  }
  return nullptr;
}
