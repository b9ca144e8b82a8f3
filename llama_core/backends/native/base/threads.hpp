// A team of threads that runs a program of phases. All tasks of a phase, in any order, end before the next phase begins.
//
// Any thread may run any task, so a descheduled thread delays only the task that it has taken. A waiting thread spins, then
// yields its core (which the server's event loop shares), then sleeps.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace llama {

struct Phase {
    int op;         // of enum Op
    int operation;  // of the program of the model, by number
    int tasks;      // their number
};

// The work of the phases.
class Tasks {
  public:
    // Runs task `task` of `phase`, on thread `thread` of the team.
    virtual void run(const Phase& phase, int task, int thread) = 0;
    // Called before a thread's first task of a program and after its last.
    virtual void enter() {}
    virtual void leave() {}
    // Called by the thread that ended a phase, before any thread begins the next.
    virtual void ended(const Phase&) {}
    virtual ~Tasks() = default;
};

class Team {
  public:
    // `cpus`: the core of each thread; empty if threads are not pinned. Thread 0 is the caller of `run`, pinned meanwhile.
    Team(int size, const std::vector<int>& cpus) : size_(size), cpus_(cpus), cores_(size) {
        try {
            for (int i = 1; i < size; i++) {
                workers_.emplace_back([this, i] { serve(i); });
                if (!cpus.empty()) pin(workers_.back().native_handle(), cpus[i]);
            }
        } catch (...) {  // no thread could be created
            stop();
            throw;
        }
    }

    ~Team() { stop(); }

    int size() const { return size_; }

    // Runs all phases; skips phases without tasks.
    void run(Tasks& what, const std::vector<Phase>& phases) {
        work_ = &what;
        phases_ = &phases;
        first_ = number_ + 1;
        if (!begin_next(-1)) return;
        calls_.fetch_add(1);
        if (sleeping_.load()) futex_wake(&calls_);
        cpu_set_t before;
        const bool pinned = !cpus_.empty() && pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0;
        if (pinned) pin(pthread_self(), cpus_[0]);
        work(0);
        if (pinned) pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    }

  private:
    void stop() {
        stopping_ = true;
        calls_.fetch_add(1);
        futex_wake(&calls_);
        for (auto& worker : workers_) worker.join();
    }

    static void pin(pthread_t thread, int cpu) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        pthread_setaffinity_np(thread, sizeof set, &set);
    }

    // The ticket holds the open phase and the first task that no thread has taken: 20 bits phase, 22 bits tasks, 22 bits next.
    // A thread takes a task by compare-and-swap of the ticket. A late thread finds a ticket of another phase and takes nothing.
    static uint64_t pack(uint64_t number, uint64_t tasks, uint64_t next) {
        return (number & kPhases) << 44 | tasks << 22 | next;
    }
    static constexpr uint64_t kPhases = (1 << 20) - 1, kTasks = (1 << 22) - 1, kClosed = 0;

    bool begin_next(int index) {
        const auto& phases = *phases_;
        do index++;
        while (index < int(phases.size()) && phases[index].tasks == 0);
        done_.store(0, std::memory_order_relaxed);
        if (index == int(phases.size())) {
            number_ = first_ + index;
            ticket_.store(kClosed, std::memory_order_release);
            return false;
        }
        number_ = first_ + index;
        ticket_.store(pack(number_, phases[index].tasks, 0), std::memory_order_release);
        return true;
    }

    // Takes tasks until the program has ended.
    void work(int thread) {
        CoreSharing& core = cores_[thread];
        Patience patience(core);
        Tasks* inside = nullptr;  // another program may have begun when this thread looks again
        for (;;) {
            uint64_t ticket = ticket_.load(std::memory_order_acquire);
            if (ticket == kClosed) break;
            uint64_t next = ticket & kTasks, tasks = ticket >> 22 & kTasks;
            if (next >= tasks) {
                patience.wait();
                continue;
            }
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            // The phase cannot end before done_ is incremented below, so the program does not change until then.
            const int index = int(((ticket >> 44) - first_) & kPhases);
            const Phase& phase = (*phases_)[index];
            if (!inside) (inside = work_)->enter();
            work_->run(phase, int(next), thread);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) {
                work_->ended(phase);
                begin_next(index);
            }
            patience.reset();
        }
        if (inside) inside->leave();
    }

    void serve(int thread) {
        uint32_t seen = 0;
        for (;;) {
            // A busy server starts its next step within a few hundred microseconds, so threads spin before they sleep.
            double until = seconds_now() + 2e-4;
            for (int turn = 0; calls_.load() == seen && seconds_now() < until; turn++)
                turn % 64 ? relax() : cores_[thread].yield();
            while (calls_.load() == seen) {
                sleeping_.fetch_add(1);
                if (calls_.load() == seen) futex_wait(&calls_, seen);
                sleeping_.fetch_sub(1);
            }
            seen = calls_.load();
            if (stopping_) return;
            work(thread);
        }
    }

    const int size_;
    const std::vector<int> cpus_;
    std::vector<CoreSharing> cores_;  // one a thread
    std::vector<std::thread> workers_;
    Tasks* work_ = nullptr;
    const std::vector<Phase>* phases_ = nullptr;
    uint64_t first_ = 1;   // number of phases_[0]
    uint64_t number_ = 0;  // of the latest phase
    alignas(64) std::atomic<uint64_t> ticket_{kClosed};
    alignas(64) std::atomic<uint64_t> done_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace llama
