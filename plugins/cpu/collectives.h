// Block barriers and warp collectives of fibers, with reports for what would hang a GPU.
#pragma once

#include <algorithm>
#include <cstring>

#include "fiber.h"

namespace cudacpu {

inline std::string at(const char* file, int line) {
  return std::string(" at ") + file + ":" + std::to_string(line);
}

enum class Barrier : int { kPlain = 0, kAnd = 1, kOr = 2, kCount = 3 };

// Every thread of the block must come to the same barrier; the last to arrive frees the others.
CUDACPU_NOSAN inline int block_barrier(int predicate, Barrier kind, const char* file, int line) {
  Context& c = context();
  Fiber* me = c.current;
  // Two addresses in turn, or a fast thread's next release would reach those still acquiring.
  [[maybe_unused]] char* token = &c.barrier[c.generation & 1];
  CUDACPU_RELEASE(token);
  me->file = file;
  me->line = line;
  c.all &= predicate != 0;
  c.any |= predicate != 0;
  c.count += predicate != 0;
  me->state = State::kBlock;
  if (++c.arrived < c.live) {
    yield();
  } else {
    if (c.live != c.threads) fail("some threads exited before __syncthreads" + at(file, line));
    for (unsigned i = 0; i < c.threads; ++i) {
      const Fiber& f = c.fibers[i];
      if (f.line != line || std::strcmp(f.file, file) != 0) {
        fail("barrier divergence: threads wait" + at(f.file, f.line) + " and" + at(file, line));
      }
    }
    c.reduced = kind == Barrier::kAnd ? c.all : kind == Barrier::kOr ? c.any : c.count;
    c.all = 1;
    c.any = c.count = 0;
    for (unsigned i = 0; i < c.threads; ++i) c.fibers[i].state = State::kReady;
    c.arrived = 0;
    ++c.generation;
    if (schedule()) yield();  // another may go on first
  }
  CUDACPU_ACQUIRE(token);
  return c.reduced;
}

using WarpFunction = void (*)(Fiber* warp, std::uint32_t mask);

// Exchanges a value within a warp. Only __syncwarp orders memory, as on a GPU (`sync`).
CUDACPU_NOSAN inline std::uint64_t warp_collective(std::uint32_t mask, int op, std::uint64_t value,
                                                   int extra, WarpFunction function,
                                                   const char* file, int line, bool sync = false) {
  Context& c = context();
  Fiber* me = c.current;
  const unsigned lane = me->linear % kWarp;
  Fiber* warp = me - lane;
  if (!(mask >> lane & 1))
    fail("a lane calls a warp function whose mask lacks it" + at(file, line));
  [[maybe_unused]] char* token = &c.warp[me->linear / kWarp];
  if (sync) CUDACPU_RELEASE(token);
  me->mask = mask;
  me->op = op;
  me->value = value;
  me->extra = extra;
  me->file = file;
  me->line = line;
  me->state = State::kWarp;
  bool complete = true;
  for (unsigned l = 0; l < kWarp; ++l) {
    if (!(mask >> l & 1)) continue;
    if (warp + l >= c.fibers.data() + c.threads || warp[l].state == State::kDone) {
      fail("the mask of a warp function names lane " + std::to_string(l) +
           ", which is absent or has exited," + at(file, line));
    }
    complete &= warp[l].state == State::kWarp && warp[l].op == op && warp[l].mask == mask;
  }
  if (complete) {
    function(warp, mask);
    for (unsigned l = 0; l < kWarp; ++l) {
      if (mask >> l & 1) warp[l].state = State::kReady;
    }
    if (schedule()) yield();
  } else {
    yield();
  }
  if (sync) CUDACPU_ACQUIRE(token);
  return me->result;
}

template <class T>
std::uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8, "warp functions take values of up to 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// What a shuffle reads from a lane that takes no part: NaN, or an absurd integer.
constexpr std::uint64_t kPoison = 0x7fbadbad7fbadbadull;

enum class Shuffle { kIndex, kUp, kDown, kXor };

template <Shuffle MODE>
CUDACPU_NOSAN inline void shuffle(Fiber* warp, std::uint32_t mask) {
  for (int l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    const int width = warp[l].extra >> 8, a = warp[l].extra & 255, base = l & ~(width - 1);
    int from = l;
    if (MODE == Shuffle::kIndex) from = base + (a & (width - 1));
    if (MODE == Shuffle::kUp && l - a >= base) from = l - a;
    if (MODE == Shuffle::kDown && l + a < base + width) from = l + a;
    if (MODE == Shuffle::kXor && (l ^ a) < base + width) from = l ^ a;
    warp[l].result = (mask >> from & 1) ? warp[from].value : kPoison;
  }
}

enum class Vote { kBallot, kAll, kAny };

template <Vote MODE>
CUDACPU_NOSAN inline void vote(Fiber* warp, std::uint32_t mask) {
  std::uint32_t bits = 0;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) && warp[l].value) bits |= 1u << l;
  }
  for (int l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    warp[l].result = MODE == Vote::kBallot ? bits : MODE == Vote::kAll ? bits == mask : bits != 0;
  }
}

CUDACPU_NOSAN inline void nothing(Fiber*, std::uint32_t) {}

enum class Reduce { kAdd, kMin, kMax };

template <class T, Reduce OP>
CUDACPU_NOSAN inline void reduce(Fiber* warp, std::uint32_t mask) {
  bool first = true;
  T total{};
  for (int l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    const T v = unpack<T>(warp[l].value);
    if (first) total = v;
    if (!first) {
      total = OP == Reduce::kAdd   ? static_cast<T>(total + v)
              : OP == Reduce::kMin ? std::min(total, v)
                                   : std::max(total, v);
    }
    first = false;
  }
  for (int l = 0; l < 32; ++l) {
    if (mask >> l & 1) warp[l].result = pack(total);
  }
}

}  // namespace cudacpu

// The caller's file and line travel as default arguments, for the reports.
#define CUDACPU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDACPU_HERE) {
  cudacpu::block_barrier(0, cudacpu::Barrier::kPlain, file, line);
}
inline int __syncthreads_and(int p, CUDACPU_HERE) {
  return cudacpu::block_barrier(p, cudacpu::Barrier::kAnd, file, line);
}
inline int __syncthreads_or(int p, CUDACPU_HERE) {
  return cudacpu::block_barrier(p, cudacpu::Barrier::kOr, file, line);
}
inline int __syncthreads_count(int p, CUDACPU_HERE) {
  return cudacpu::block_barrier(p, cudacpu::Barrier::kCount, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDACPU_HERE) {
  cudacpu::warp_collective(mask, 1, 0, 0, cudacpu::nothing, file, line, true);
}

#define CUDACPU_SHUFFLE(name, mode, op)                                                    \
  template <class T>                                                                       \
  inline T name(unsigned mask, T value, int a, int width = 32, CUDACPU_HERE) {             \
    return cudacpu::unpack<T>(                                                             \
        cudacpu::warp_collective(mask, op, cudacpu::pack(value), (width << 8) | (a & 255), \
                                 cudacpu::shuffle<cudacpu::Shuffle::mode>, file, line));   \
  }
CUDACPU_SHUFFLE(__shfl_sync, kIndex, 2)
CUDACPU_SHUFFLE(__shfl_up_sync, kUp, 3)
CUDACPU_SHUFFLE(__shfl_down_sync, kDown, 4)
CUDACPU_SHUFFLE(__shfl_xor_sync, kXor, 5)

#define CUDACPU_VOTE(type, name, mode, op)                                     \
  inline type name(unsigned mask, int p, CUDACPU_HERE) {                       \
    return static_cast<type>(cudacpu::warp_collective(                         \
        mask, op, p != 0, 0, cudacpu::vote<cudacpu::Vote::mode>, file, line)); \
  }
CUDACPU_VOTE(unsigned, __ballot_sync, kBallot, 6)
CUDACPU_VOTE(int, __all_sync, kAll, 7)
CUDACPU_VOTE(int, __any_sync, kAny, 8)

#define CUDACPU_REDUCE(name, T, mode, op)                                                         \
  inline T name(unsigned mask, T value, CUDACPU_HERE) {                                           \
    return cudacpu::unpack<T>(cudacpu::warp_collective(mask, op, cudacpu::pack(value), 0,         \
                                                       cudacpu::reduce<T, cudacpu::Reduce::mode>, \
                                                       file, line));                              \
  }
CUDACPU_REDUCE(__reduce_add_sync, unsigned, kAdd, 9)
CUDACPU_REDUCE(__reduce_add_sync, int, kAdd, 10)
CUDACPU_REDUCE(__reduce_min_sync, unsigned, kMin, 11)
CUDACPU_REDUCE(__reduce_min_sync, int, kMin, 12)
CUDACPU_REDUCE(__reduce_max_sync, unsigned, kMax, 13)
CUDACPU_REDUCE(__reduce_max_sync, int, kMax, 14)
