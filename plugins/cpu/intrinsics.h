// Device functions that NVIDIA's host headers lack.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "collectives.h"

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}
inline unsigned __float_as_uint(float f) { return cudacpu::unpack<unsigned>(cudacpu::pack(f)); }
inline float __uint_as_float(unsigned u) { return cudacpu::unpack<float>(u); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

// Atomics order nothing else, as on a GPU.
template <class T, class F>
inline T cudacpu_update(T* p, F f) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do {
    next = f(old);
  } while (!__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
template <class T>
inline T atomicAdd(T* p, std::common_type_t<T> v) {
  return cudacpu_update(p, [v](T old) { return static_cast<T>(old + v); });
}
template <class T>
inline T atomicMax(T* p, std::common_type_t<T> v) {
  return cudacpu_update(p, [v](T old) { return std::max(old, v); });
}
template <class T>
inline T atomicMin(T* p, std::common_type_t<T> v) {
  return cudacpu_update(p, [v](T old) { return std::min(old, v); });
}
