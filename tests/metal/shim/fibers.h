// Runs one threadgroup after another, every GPU thread a fiber of this CPU thread. A fiber runs until it waits at a
// barrier or a simd operation, or ends; the order of the fibers is the schedule, chosen by a seed.
#pragma once
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_PORTABLE 1
#include <ucontext.h>
#endif

namespace emulator {

constexpr size_t STACK = 128 << 10;
constexpr int SIMD = 32;
constexpr size_t THREADGROUP_MEMORY = 32768;
constexpr int MOST_THREADS = 1024;
// Bits of MXCSR: no exception is raised; subnormal results and operands become zero; rounding toward zero.
constexpr unsigned DEFAULT = 0x1F80, FLUSH = 0x8040, TOWARD_ZERO = 0x6000;

struct Triple {
  uint32_t x, y, z;
};

// --- switching from one stack to another -----------------------------------------------------------------------------
#ifdef EMULATOR_PORTABLE
struct Context {
  ucontext_t state;
};
inline void switch_to(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
#else
struct Context {
  void* stack;
};
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
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
.size emulator_switch, .-emulator_switch
)");
inline void switch_to(Context& from, Context& to) { emulator_switch(&from.stack, to.stack); }
#endif

// --- threads and their groups ----------------------------------------------------------------------------------------
enum class Wait : uint8_t { none, barrier, simd, ended };

struct Fiber {
  Context context;
  char* stack = nullptr;
  Triple in_group, in_grid;
  uint32_t index;
  Wait wait;
  unsigned phase;
  const char* site;
};

struct Simdgroup {
  int alive = 0, arrived = 0;
  unsigned phase = 0;
  const char* site = nullptr;
  alignas(16) char values[2][SIMD][16];
  uint32_t posted[2];
};

struct Group {
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  std::vector<uint32_t> order, place;
  Context main;
  int size = 0, alive = 0, arrived = 0;
  unsigned phase = 0;
  const char* site = nullptr;
  uint32_t current = 0;
  Triple position, shape, groups, grid;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  std::vector<void*> variables;
  size_t bytes = 0;
  std::string error;
};

static Group group;  // a process emulates one launch at a time
static sigjmp_buf fault;
static bool guarded = false;

inline Fiber& self() { return group.fibers[group.current]; }

inline std::string place() {
  const Fiber& f = self();
  char text[160];
  std::snprintf(text, sizeof text, " [thread (%u, %u, %u) of threadgroup (%u, %u, %u)]", f.in_group.x, f.in_group.y,
                f.in_group.z, group.position.x, group.position.y, group.position.z);
  return text;
}

[[noreturn]] inline void fail(const std::string& message) {
  group.error = message + place();
  Context dead;
  switch_to(dead, group.main);
  __builtin_unreachable();
}

inline bool runnable(const Fiber& f) {
  if (f.wait == Wait::barrier) return f.phase != group.phase;
  if (f.wait == Wait::simd) return f.phase != group.simdgroups[f.index / SIMD].phase;
  return f.wait == Wait::none;
}

inline void yield() {  // to the next fiber of the schedule that can go on
  const uint32_t me = group.current, from = group.place[me];
  for (int i = 1; i <= group.size; i++) {
    const uint32_t next = group.order[(from + i) % group.size];
    Fiber& f = group.fibers[next];
    if (!runnable(f)) continue;
    f.wait = Wait::none;
    if (next == me) return;
    group.current = next;
    switch_to(group.fibers[me].context, f.context);
    return;
  }
  if (group.alive == 0) {
    switch_to(group.fibers[me].context, group.main);
    return;
  }
  const char* site = "a simd operation";
  for (int i = 0; i < group.size; i++)
    if (group.fibers[i].wait == Wait::barrier || group.fibers[i].wait == Wait::simd) site = group.fibers[i].site;
  fail(std::string("some threads wait forever at ") + site);
}

inline void run_fiber() {
  group.body(group.arguments);
  Fiber& f = self();
  f.wait = Wait::ended;
  group.alive--;
  Simdgroup& s = group.simdgroups[f.index / SIMD];
  s.alive--;
  if (s.arrived && s.arrived == s.alive) {
    s.arrived = 0;
    s.phase++;
  }
  if (group.arrived) fail(std::string("a thread ended while others wait at ") + group.site);
  yield();
  __builtin_unreachable();
}

inline void barrier(const char* site) {
  if (group.alive != group.size) fail(std::string("some threads ended before ") + site);
  if (group.arrived == 0) group.site = site;
  if (std::strcmp(group.site, site)) fail(std::string("threads wait at ") + group.site + " and at " + site);
  Fiber& f = self();
  f.site = site;
  if (++group.arrived == group.alive) {
    group.arrived = 0;
    group.phase++;
  } else {
    f.wait = Wait::barrier;
    f.phase = group.phase;
  }
  yield();
}

// --- simd operations: every lane posts a value, and all go on when the last one has --------------------------------
struct Posted {
  Simdgroup& simd;
  int buffer;
  uint32_t lane, mask;
  template <class T>
  T value(uint32_t of) const {
    T v;
    std::memcpy(&v, simd.values[buffer][of], sizeof v);
    return v;
  }
};

template <class T>
Posted post(const T& v, const char* site) {
  static_assert(sizeof(T) <= 16);
  Fiber& f = self();
  Simdgroup& s = group.simdgroups[f.index / SIMD];
  const int buffer = s.phase & 1;
  const uint32_t lane = f.index % SIMD;
  if (s.arrived == 0) {
    s.site = site;
    s.posted[buffer] = 0;
  } else if (std::strcmp(s.site, site)) {
    fail(std::string("lanes meet at ") + s.site + " and at " + site);
  }
  std::memcpy(s.values[buffer][lane], &v, sizeof v);
  s.posted[buffer] |= 1u << lane;
  f.site = site;
  if (++s.arrived == s.alive) {
    s.arrived = 0;
    s.phase++;
  } else {
    f.wait = Wait::simd;
    f.phase = s.phase;
    yield();
  }
  return {s, buffer, lane, s.posted[buffer]};
}

// --- memory ----------------------------------------------------------------------------------------------------------
// A threadgroup's variable is static memory; when its first thread meets it, it is filled with NaN patterns.
template <class T>
bool threadgroup_variable(T& v) {
  if (std::find(group.variables.begin(), group.variables.end(), &v) != group.variables.end()) return true;
  group.variables.push_back(&v);
  group.bytes += sizeof v;
  if (group.bytes > THREADGROUP_MEMORY) fail("more than 32768 bytes of threadgroup memory");
  std::memset(static_cast<void*>(&v), 0xFF, sizeof v);
  return true;
}

inline void on_fault(int) {
  if (guarded) siglongjmp(fault, 1);
  _exit(139);
}

// --- a launch --------------------------------------------------------------------------------------------------------
inline void arrange(unsigned seed, std::mt19937& random) {
  group.order.resize(group.size);
  group.place.resize(group.size);
  for (int i = 0; i < group.size; i++) group.order[i] = seed == 1 ? group.size - 1 - i : i;
  if (seed > 1) std::shuffle(group.order.begin(), group.order.end(), random);
  for (int i = 0; i < group.size; i++) group.place[group.order[i]] = i;
}

inline void prepare(Fiber& f, int index, Triple threads) {
  const Triple shape = group.shape;
  f.in_group = {index % shape.x, index / shape.x % shape.y, index / (shape.x * shape.y)};
  f.in_grid = {group.position.x * threads.x + f.in_group.x, group.position.y * threads.y + f.in_group.y,
               group.position.z * threads.z + f.in_group.z};
  f.index = index;
  f.wait = Wait::none;
  group.simdgroups[index / SIMD].alive++;
  if (!f.stack)
    f.stack = static_cast<char*>(
        mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  const size_t top = STACK - 64 - index * 832 % 16384;  // not all stacks on the same lines of the cache
#ifdef EMULATOR_PORTABLE
  getcontext(&f.context.state);
  f.context.state.uc_stack.ss_sp = f.stack;
  f.context.state.uc_stack.ss_size = top;
  f.context.state.uc_link = nullptr;
  makecontext(&f.context.state, run_fiber, 0);
#else
  void** stack = reinterpret_cast<void**>(f.stack + top);
  *--stack = nullptr;
  *--stack = reinterpret_cast<void*>(run_fiber);
  for (int i = 0; i < 6; i++) *--stack = nullptr;
  f.context.stack = stack;
#endif
}

inline void run_group(Triple position, Triple threads, unsigned seed, std::mt19937& random) {
  group.position = position;
  // Groups at the edge of the grid are smaller.
  group.shape = {std::min(threads.x, group.grid.x - position.x * threads.x),
                 std::min(threads.y, group.grid.y - position.y * threads.y),
                 std::min(threads.z, group.grid.z - position.z * threads.z)};
  group.size = group.alive = group.shape.x * group.shape.y * group.shape.z;
  group.arrived = 0;
  group.phase = 0;
  group.variables.clear();
  group.bytes = 0;
  if (static_cast<int>(group.fibers.size()) < group.size) group.fibers.resize(group.size);
  group.simdgroups.resize((group.size + SIMD - 1) / SIMD);
  for (Simdgroup& s : group.simdgroups) {
    s.alive = s.arrived = 0;
    s.phase = 0;
  }
  arrange(seed, random);
  for (int i = 0; i < group.size; i++) prepare(group.fibers[i], i, threads);
  group.current = group.order[0];
  switch_to(group.main, group.fibers[group.current].context);
}

inline unsigned control(unsigned bits) {
#ifdef __x86_64__
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(bits);
  return before;
#else
  return bits;
#endif
}

// seed 0: threads in order; 1: in reverse order; any other: shuffled for every group. flush, toward_zero: what the
// language lets a device do, and only x86-64 can be told to. Returns 1 and a message in
// `error` where the kernel does what it must not.
inline int run(Triple grid, Triple threads, unsigned seed, bool flush, bool toward_zero, void (*body)(void*),
               void* arguments, char* error, int length) {
  if (static_cast<uint64_t>(threads.x) * threads.y * threads.z > MOST_THREADS) {
    std::snprintf(error, length, "more than %d threads in a threadgroup", MOST_THREADS);
    return 1;
  }
  static char stack_of_handler[65536];
  stack_t alternative{};
  alternative.ss_sp = stack_of_handler;
  alternative.ss_size = sizeof stack_of_handler;
  sigaltstack(&alternative, nullptr);
  struct sigaction action {}, segv, bus;
  action.sa_handler = on_fault;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  group.error.clear();
  group.body = body;
  group.arguments = arguments;
  group.grid = grid;
  group.groups = {(grid.x + threads.x - 1) / threads.x, (grid.y + threads.y - 1) / threads.y,
                  (grid.z + threads.z - 1) / threads.z};
  std::mt19937 random(seed);
  const unsigned before = control(DEFAULT | (flush ? FLUSH : 0) | (toward_zero ? TOWARD_ZERO : 0));
  guarded = true;
  if (sigsetjmp(fault, 1)) {
    group.error = "an access outside of every buffer" + place();
  } else {
    for (uint32_t z = 0; z < group.groups.z; z++)
      for (uint32_t y = 0; y < group.groups.y; y++)
        for (uint32_t x = 0; x < group.groups.x && group.error.empty(); x++)
          run_group({x, y, z}, threads, seed, random);
  }
  guarded = false;
  control(before);
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  if (group.error.empty()) return 0;
  std::snprintf(error, length, "%s", group.error.c_str());
  return 1;
}

}  // namespace emulator
