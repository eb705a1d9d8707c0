// Fibers: functions with separate stacks that switch to each other explicitly.
//
// A switch saves the callee-saved registers and moves the stack pointer, which takes a few nanoseconds. It also tells
// AddressSanitizer the new stack.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT  // portable, but a switch makes a system call to save signal masks
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef CUDA_ON_CPU_UCONTEXT
// Saves the stack pointer in *from and continues on the stack `to`. Every translation unit contains the code, and the
// linker keeps one copy, like an inline function.
extern "C" void cuda_on_cpu_switch_stacks(void** from, void* to);
asm(R"(
  .ifndef cuda_on_cpu_switch_stacks  # units that the linker optimises together meet in one file
  .pushsection .text.cuda_on_cpu_switch_stacks, "axG", @progbits, cuda_on_cpu_switch_stacks, comdat
  .weak cuda_on_cpu_switch_stacks
  .type cuda_on_cpu_switch_stacks, @function
cuda_on_cpu_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_on_cpu_switch_stacks, . - cuda_on_cpu_switch_stacks
  .popsection
  .endif
)");
#endif

namespace cuda_on_cpu {

// A Fiber that was not started represents the stack of the OS thread that switches away from it.
class Fiber {
 public:
  using Entry = Fiber& (*)();  // runs to its end and returns the next fiber
#ifdef __SANITIZE_ADDRESS__
  static constexpr std::size_t kStack = 256 << 10;
#else
  static constexpr std::size_t kStack = 64 << 10;
#endif

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (mapping_) munmap(mapping_, page() + kStack);
  }

  // The next switch to this fiber calls entry(). `number` shifts the start of the stack, so that the hot ends of all
  // stacks do not compete for the same cache sets.
  void start(Entry entry, int number) {
    if (!mapping_) allocate();
    entry_ = entry;
    char* top = static_cast<char*>(mapping_) + page() + kStack - static_cast<std::size_t>(number % 16) * 448;
#ifdef CUDA_ON_CPU_UCONTEXT
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<char*>(mapping_) + page();
    context_.uc_stack.ss_size = static_cast<std::size_t>(top - static_cast<char*>(context_.uc_stack.ss_sp));
    makecontext(&context_, &Fiber::begin, 0);
#else
    auto* frame =
        reinterpret_cast<std::uintptr_t*>(top) - 8;  // six registers, begin(), and a return address that is never used
    for (int i = 0; i < 8; ++i) frame[i] = 0;
    frame[6] = reinterpret_cast<std::uintptr_t>(&Fiber::begin);
    stack_pointer_ = frame;
#endif
    fake_stack_ = nullptr;
    bottom_ = static_cast<char*>(mapping_) + page();
    size_ = kStack;
  }

  // Continues with `next` until another fiber switches back here; after the `last` switch none does.
  void switch_to(Fiber& next, bool last = false) {
    left_ = this, entered_ = &next;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, next.bottom_, next.size_);
#else
    (void)last;
#endif
#ifdef CUDA_ON_CPU_UCONTEXT
    swapcontext(&context_, &next.context_);
#else
    cuda_on_cpu_switch_stacks(&stack_pointer_, next.stack_pointer_);
#endif
    arrive();
  }

 private:
  static std::size_t page() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
  }

  // A guard page below the stack: an overflow ends the program instead of corrupting another stack.
  void allocate() {
    void* block = mmap(nullptr, page() + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    mapping_ = block;
    if (mprotect(block, page(), PROT_NONE) != 0) throw std::bad_alloc();
  }

  static void arrive() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(entered_->fake_stack_, &left_->bottom_, &left_->size_);
#endif
  }

  // Not instrumented: this frame never returns, and its red zones would remain on the stack.
  [[gnu::no_sanitize_address]] static void begin() {
    arrive();
    Fiber& me = *entered_;
    me.switch_to(me.entry_(), true);
  }

  static inline constinit thread_local Fiber *left_ = nullptr, *entered_ = nullptr;  // of the latest switch
#ifdef CUDA_ON_CPU_UCONTEXT
  ucontext_t context_{};
#else
  void* stack_pointer_ = nullptr;
#endif
  Entry entry_ = nullptr;
  void* mapping_ = nullptr;
  void* fake_stack_ = nullptr;  // these three are for AddressSanitizer
  const void* bottom_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace cuda_on_cpu
