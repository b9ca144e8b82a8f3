// How a thread waits for another thread that needs some microseconds, on cores that other processes may use too.
//
// A thread spins first. Then it yields its core, so that the server's event loop and HAProxy, which run on the same cores,
// are not held up. Beside a process that never sleeps, a yield costs a whole time slice (1.5 to 4 ms on Linux 6.18: EEVDF
// moves the yielding thread's deadline by one slice), and a step has two all-gathers a layer. CoreSharing therefore stops
// yielding where yields cost slices. The kernel then shares the core evenly between the two.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace llama {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline double seconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

inline void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, const timespec* timeout = nullptr, bool shared = false) {
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word, bool shared = false) {
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Decides for one thread whether it may yield its core. Not shared between threads.
class CoreSharing {
  public:
    // Yields, or spins for a moment where yields have cost time slices.
    void yield() {
        const double before = seconds_now();
        if (before < paused_until_) {
            for (int i = 0; i < 16; i++) relax();
            return;
        }
        sched_yield();
        observe(before, seconds_now());
    }

    // Records a yield from `before` to `after`, in seconds of any clock.
    void observe(double before, double after) {
        if (after - before < kSlice) {
            if (cheap_in_a_row_ < kCheap && ++cheap_in_a_row_ == kCheap) pause_ = kFirstPause;
            return;
        }
        cheap_in_a_row_ = 0;
        if (before - window_begin_ > kWindow) {
            window_begin_ = before;
            lost_ = 0;
        }
        lost_ += after - before;
        // The server's own event loop takes a core for a slice or two once a step. A process that never sleeps takes most of
        // the window.
        if (pause_ == kFirstPause && lost_ < kMostLost) return;
        paused_until_ = after + pause_;
        pause_ = std::min(2 * pause_, kLongestPause);
    }

  private:
    static constexpr double kSlice = 1.4e-3, kWindow = 15e-3, kFirstPause = 100e-3, kLongestPause = 800e-3;
    static constexpr double kMostLost = 0.4 * kWindow;  // seconds that yields may cost in a window before yielding pauses
    static constexpr int kCheap = 16;                   // short yields in a row after which the core counts as free again

    double paused_until_ = 0, pause_ = kFirstPause;
    double window_begin_ = -1, lost_ = 0;
    int cheap_in_a_row_ = 0;
};

// Waits in three stages: spins, then yields the core, then sleeps 50 microseconds at a time.
class Patience {
  public:
    explicit Patience(CoreSharing& core) : core_(&core) {}
    void reset() { turns_ = 0; }
    void wait() {
        if (++turns_ < 256) {
            relax();
        } else if (turns_ < 4096) {
            core_->yield();
        } else {
            timespec nap{0, 50'000};
            nanosleep(&nap, nullptr);
        }
    }

  private:
    CoreSharing* core_;
    int turns_ = 0;
};

}  // namespace llama
