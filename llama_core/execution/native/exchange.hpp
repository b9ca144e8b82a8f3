// How ranks see each other's values: everyone writes into its own place, then reads everyone's.
//
// Ranks of one node do so in shared memory. Two places a rank, used in turn: when a rank begins to write for exchange n + 2,
// every peer has come to exchange n + 1 and is done reading n. Elsewhere a function of the caller's carries the bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "waiting.hpp"

namespace llama {

class Exchange {
  public:
    virtual ~Exchange() = default;
    // Where this rank writes for the next exchange.
    virtual char* mine() = 0;
    // Gives `bytes` of mine() to all; returns when all ranks have done so. Then of(rank) holds theirs until the next but one.
    virtual void swap(size_t bytes) = 0;
    virtual const char* of(int rank) = 0;
    // Whether a swap did not succeed: what was computed since means nothing.
    virtual bool failed() const { return false; }
    // Seconds from when this rank had come to a swap to when the last one had, in all.
    double waited() const { return waited_; }

  protected:
    double waited_ = 0;
};

class SharedMemoryExchange : public Exchange {
  public:
    // `memory`: size_for(ranks, bytes), zeroed before anyone came, mapped by all ranks.
    SharedMemoryExchange(char* memory, int rank, int ranks, size_t bytes)
        : memory_(memory), rank_(rank), ranks_(ranks), bytes_(align(bytes)) {}

    static size_t size_for(int ranks, size_t bytes) { return ranks * (kLine + 2 * align(bytes)); }

    char* mine() override { return place(rank_, number_ + 1); }
    const char* of(int rank) override { return place(rank, number_); }

    void swap(size_t) override {
        number_++;
        const double here = seconds_now();
        came(rank_).store(here, std::memory_order_relaxed);
        arrived(rank_).store(number_, std::memory_order_seq_cst);
        futex_wake_if_waited(rank_);
        double last = here;
        for (int peer = 0; peer < ranks_; peer++) {
            await(peer);
            last = std::max(last, came(peer).load(std::memory_order_relaxed));
        }
        // Not until now: a rank that was without a core meanwhile is late by itself.
        waited_ += last - here;
    }

  private:
    static constexpr size_t kLine = 128;
    static size_t align(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
    std::atomic<uint32_t>& arrived(int rank) { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + rank * kLine); }
    // When a rank came to this swap, by the clock that all processes of a host share. Two places, as for what it brought.
    std::atomic<double>& came(int rank) {
        return *reinterpret_cast<std::atomic<double>*>(memory_ + rank * kLine + 8 + number_ % 2 * 8);
    }
    std::atomic<uint32_t>& waiters(int rank) { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + rank * kLine + 64); }
    char* place(int rank, uint32_t number) { return memory_ + ranks_ * kLine + (size_t(rank) * 2 + number % 2) * bytes_; }

    bool there(int peer) { return int32_t(arrived(peer).load(std::memory_order_acquire) - number_) >= 0; }

    void futex_wake_if_waited(int rank) {
        if (waiters(rank).load()) futex_wake(&arrived(rank), true);
    }

    // A peer may be at work on its last few microseconds, or without a core: spin, yield, then sleep until it says so.
    void await(int peer) {
        for (int turn = 0; turn < 2048; turn++) {
            if (there(peer)) return;
            turn % 16 == 15 ? core_.yield() : relax();
        }
        waiters(peer).fetch_add(1);
        while (!there(peer)) {
            uint32_t seen = arrived(peer).load();
            if (int32_t(seen - number_) >= 0) break;
            timespec limit{0, 10'000'000};
            futex_wait(&arrived(peer), seen, &limit, true);
        }
        waiters(peer).fetch_sub(1);
    }

    CoreSharing core_;
    char* memory_;
    int rank_, ranks_;
    size_t bytes_;
    uint32_t number_ = 0;
};

// `carry(send, receive, bytes)`: gathers every rank's `send` into `receive` [ranks][bytes]; 0, or not if it failed.
using Carry = int (*)(const char* send, char* receive, size_t bytes);

class CarriedExchange : public Exchange {
  public:
    CarriedExchange(Carry carry, int ranks, size_t bytes)
        : carry_(carry), send_(new char[bytes]), receive_(new char[bytes * ranks]) {}
    char* mine() override { return send_.get(); }
    void swap(size_t bytes) override {
        bytes_ = bytes;
        const double here = seconds_now();
        failed_ = failed_ || carry_(send_.get(), receive_.get(), bytes) != 0;  // once failed, it would only fail again, late
        waited_ += seconds_now() - here;
    }
    const char* of(int rank) override { return receive_.get() + rank * bytes_; }
    bool failed() const override { return failed_; }

  private:
    Carry carry_;
    bool failed_ = false;
    std::unique_ptr<char[]> send_, receive_;
    size_t bytes_ = 0;
};

}  // namespace llama
