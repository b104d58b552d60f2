/* The only file that names memory orders. */
#ifndef SHMQ_ATOMICS_H
#define SHMQ_ATOMICS_H

#include <stdatomic.h>

#define ld(p) atomic_load_explicit((p), memory_order_relaxed)
#define ld_acquire(p) atomic_load_explicit((p), memory_order_acquire)
#define st(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)
#define st_release(p, v) atomic_store_explicit((p), (v), memory_order_release)
/* Counters with one writing side (a lock): no locked instruction needed. */
#define bump(p, n) st((p), ld(p) + (n))
#define fence_full() atomic_thread_fence(memory_order_seq_cst)
/* A full fence right after a mutex was unlocked. On x86 the unlock is a locked instruction and
 * therefore a full fence already. */
#if defined(__x86_64__)
#define fence_unlocked() atomic_signal_fence(memory_order_seq_cst)
#else
#define fence_unlocked() fence_full()
#endif
/* Ask for a cache line ahead of its use. Any address is allowed. */
#define prefetch(p) __builtin_prefetch(p)
#define fence_acquire() atomic_thread_fence(memory_order_acquire)

#if defined(__x86_64__) || defined(__i386__)
#define cpu_relax() __builtin_ia32_pause()
#else
#define cpu_relax() ((void)0)
#endif

#endif
