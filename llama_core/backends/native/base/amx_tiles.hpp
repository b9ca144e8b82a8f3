// The tile registers of AMX: their shapes, and the operating system's permission to use them. On other CPUs
// the functions do nothing.
#pragma once

#include "simd.hpp"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(LLAMA_NO_AMX)
#define LLAMA_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llama {

#if defined(LLAMA_AMX)
// The shapes of the eight tile registers: 16 rows of 64 bytes unless changed.
struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

    void use() const {
        asm volatile("" ::"r"(this) : "memory");  // GCC's intrinsic declares a read of 8 of the 64 bytes
        _tile_loadconfig(this);
    }
};
inline void use_tiles() { TileShapes().use(); }
inline void release_tiles() { _tile_release(); }
// Asks the operating system for permission to use the registers. Every process asks once.
inline bool allow_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#else
inline void use_tiles() {}
inline void release_tiles() {}
inline bool allow_tiles() { return true; }
#endif

}  // namespace llama
