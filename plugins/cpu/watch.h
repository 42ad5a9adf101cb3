// Counts the 16-byte loads of a watched array, so that a test can say how often it is read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fiber.h"

namespace cudacpu {

// counts[i] grows with every load of the 16 bytes from base + 16 * i on.
struct Watch {
  std::uintptr_t base = 0;
  std::size_t bytes = 0;
  std::uint32_t* counts = nullptr;

  CUDACPU_NOSAN void count(const void* address) {
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(address) - base;
    if (at < bytes) ++counts[at / 16];
  }
};
inline Watch& watch() {
  static Watch one;
  return one;
}

}  // namespace cudacpu
