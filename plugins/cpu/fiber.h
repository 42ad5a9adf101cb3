// Threads of a block as fibers: stacks of their own, switched by hand, known to the sanitizers.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <vector_functions.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
// What a thread wrote before a release is visible to whoever acquires the same address later;
// accesses that no such pair orders are reported as a race.
#define CUDACPU_RELEASE(p) __tsan_release(p)
#define CUDACPU_ACQUIRE(p) __tsan_acquire(p)
#define CUDACPU_NOSAN __attribute__((no_sanitize("thread"), noinline))
#else
#define CUDACPU_RELEASE(p) ((void)0)
#define CUDACPU_ACQUIRE(p) ((void)0)
// A frame that is left by a switch would leave its guards behind.
#define CUDACPU_NOSAN __attribute__((no_sanitize("address"), noinline))
#endif

#if defined(__x86_64__) && !defined(CUDACPU_UCONTEXT)
#define CUDACPU_ASM 1
#else
#include <ucontext.h>  // any other machine; slower, two system calls a switch
#endif

inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim, gridDim;

#if defined(CUDACPU_ASM)
// Saves the callee-saved registers on the running stack, goes on with those of another.
extern "C" void cudacpu_swap(void** save, void* load);
asm(R"(
.text
.weak cudacpu_swap
.hidden cudacpu_swap
.type cudacpu_swap,@function
cudacpu_swap:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size cudacpu_swap,.-cudacpu_swap
)");
#endif

namespace cudacpu {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStack = 256 << 10;
#else
constexpr std::size_t kStack = 64 << 10;
#endif

// A kernel that cannot go on: what a GPU would hang on, corrupt memory with, or refuse.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class State : std::uint8_t { kReady, kBlock, kWarp, kDone };

struct Fiber {
  void* sp = nullptr;  // saved stack pointer
#if !defined(CUDACPU_ASM)
  ucontext_t uc;
#endif
  char* stack = nullptr;
  void* fake = nullptr;  // AddressSanitizer's fake stack
  void* tsan = nullptr;
  uint3 tid{};
  unsigned linear = 0;
  State state = State::kDone;
  // What it gives to and gets from a warp collective, and where it waits.
  std::uint64_t value = 0, result = 0;
  int extra = 0;
  std::uint32_t mask = 0;
  int op = 0;
  const char* file = "";
  int line = 0;
};

// The block in flight; there is one per process.
struct Context {
  std::vector<Fiber> fibers;
  Fiber main;
  Fiber* current = nullptr;
  void (*entry)(void*) = nullptr;
  void* arg = nullptr;
  unsigned threads = 0, live = 0, arrived = 0;
  int all = 1, any = 0, count = 0, reduced = 0;
  unsigned generation = 0;
  unsigned char* dynamic = nullptr;
  std::string error;
  // Addresses for the happens-before relation: barriers, warps, begin and end of a block. With one
  // address for both ends, a thread that runs to its end would be ordered before the next.
  char barrier[2] = {0, 0};
  char warp[kMaxThreads / kWarp] = {};
  char begin = 0, end = 0;
};

inline Context& context() {
  static Context c;
  return c;
}

// Order in which threads (and for 1 also blocks) take turns: 0 ascending, 1 descending,
// 2 ascending but yielding at every barrier, above that random, drawn anew in each round.
inline std::uint64_t& schedule() {
  static std::uint64_t s = [] {
    const char* given = std::getenv("CUDACPU_SEED");
    return given ? std::strtoull(given, nullptr, 10) : 0ull;
  }();
  return s;
}

CUDACPU_NOSAN inline void swap_to(Fiber& from, Fiber& to, [[maybe_unused]] bool dying = false) {
  context().current = &to;
  threadIdx = to.tid;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(dying ? nullptr : &from.fake, to.stack, to.stack ? kStack : 0);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(CUDACPU_ASM)
  cudacpu_swap(&from.sp, to.sp);
#else
  swapcontext(&from.uc, &to.uc);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#endif
}

// Gives the turn to the scheduler.
CUDACPU_NOSAN inline void yield() { swap_to(*context().current, context().main); }

// Ends the launch with a message; does not return in a fiber.
CUDACPU_NOSAN inline void fail(const std::string& what) {
  Context& c = context();
  if (c.error.empty()) {
    c.error = what + " [block (" + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) +
              "," + std::to_string(blockIdx.z) + ") thread " + std::to_string(c.current->linear) +
              "]";
  }
  c.current->state = State::kBlock;
  c.live = 0;  // stops the scheduler
  yield();
}

CUDACPU_NOSAN inline void trampoline() {
  Context& c = context();
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  std::size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  c.main.stack = const_cast<char*>(static_cast<const char*>(bottom));
#endif
  CUDACPU_ACQUIRE(&c.begin);  // after the host and the block before
  c.entry(c.arg);
  CUDACPU_RELEASE(&c.end);
  c.current->state = State::kDone;
  --c.live;
  swap_to(*c.current, c.main, true);
  std::abort();
}

// Makes the fiber start at the trampoline at its next turn.
CUDACPU_NOSAN inline void rewind(Fiber& f) {
  f.state = State::kReady;
  f.line = 0;
  f.file = "";
#if defined(__SANITIZE_THREAD__)
  if (!f.tsan) f.tsan = __tsan_create_fiber(0);  // kept: blocks are ordered by `end`
#endif
#if defined(CUDACPU_ASM)
  void** sp = reinterpret_cast<void**>(f.stack + kStack);
  *--sp = nullptr;  // rsp % 16 == 8 at entry, as after a call
  *--sp = reinterpret_cast<void*>(&trampoline);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  f.sp = sp;
#else
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = f.stack;
  f.uc.uc_stack.ss_size = kStack;
  f.uc.uc_link = nullptr;
  makecontext(&f.uc, reinterpret_cast<void (*)()>(trampoline), 0);
#endif
}

// Makes sure that there are stacks for a block of `threads`.
inline void grow(Context& c, unsigned threads) {
  while (c.fibers.size() < threads) {
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw Error("no memory for the stacks of a block");
    c.fibers.emplace_back();
    c.fibers.back().stack = static_cast<char*>(stack);
  }
}

}  // namespace cudacpu
