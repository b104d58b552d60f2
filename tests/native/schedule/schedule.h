/*
 * The core under an exhaustive scheduler: included before everything else (-include) where the
 * core's own sources are compiled for test_schedule. Its atomics, locks, doorbells, clock and heap
 * become those of the scheduler: every access to shared memory is a point at which another actor
 * may go on or this one may die.
 */
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* ---- what the core's code calls ---- */

void schedule_access(const volatile void *at, bool writes);
bool schedule_forwarded(const volatile void *at, void *value, size_t size);
void schedule_store(volatile void *at, const void *value, size_t size);
void schedule_drain(void);
void *schedule_alloc(size_t size);
void *schedule_map(size_t size, int fd);
int schedule_clock(clockid_t clock, struct timespec *t);
int schedule_pause(void);
int schedule_sem_init(sem_t *sem, unsigned value);
int schedule_sem_post(sem_t *sem);
int schedule_sem_trywait(sem_t *sem);
int schedule_sem_wait(sem_t *sem);

#define SHMQ_ATOMICS_H /* instead of core/atomics.h */
#define PLAIN_(p) __typeof__((void)0, *(p))
#define LOAD_(p, order)                                                                            \
	({                                                                                             \
		__auto_type at_ = (p);                                                                     \
		PLAIN_(at_) v_;                                                                            \
		schedule_access(at_, false);                                                               \
		if (!schedule_forwarded(at_, &v_, sizeof(v_)))                                             \
			v_ = atomic_load_explicit(at_, order);                                                 \
		v_;                                                                                        \
	})
#define ld(p) LOAD_(p, memory_order_relaxed)
#define ld_acquire(p) LOAD_(p, memory_order_acquire)
#define st(p, v)                                                                                   \
	({                                                                                             \
		__auto_type to_ = (p);                                                                     \
		PLAIN_(to_) s_ = (v);                                                                      \
		schedule_store(to_, &s_, sizeof(s_));                                                      \
	})
#define st_release(p, v) st(p, v)
#define bump(p, n) st((p), ld(p) + (n))
#define fence_full() schedule_drain()
#define fence_unlocked() ((void)0) /* what unlocking drained */
#define prefetch(p) ((void)(p))
#define fence_acquire() ((void)0)
#define cpu_relax() ((void)0)

#define RMW_(p) (schedule_drain(), schedule_access((p), true))
#undef atomic_store
#undef atomic_exchange
#undef atomic_fetch_add
#undef atomic_fetch_sub
#undef atomic_fetch_or
#undef atomic_fetch_and
#undef atomic_compare_exchange_strong
#undef atomic_compare_exchange_weak
#define atomic_store(p, v) (RMW_(p), atomic_store_explicit((p), (v), memory_order_seq_cst))
#define atomic_exchange(p, v) (RMW_(p), atomic_exchange_explicit((p), (v), memory_order_seq_cst))
#define atomic_fetch_add(p, v) (RMW_(p), atomic_fetch_add_explicit((p), (v), memory_order_seq_cst))
#define atomic_fetch_sub(p, v) (RMW_(p), atomic_fetch_sub_explicit((p), (v), memory_order_seq_cst))
#define atomic_fetch_or(p, v) (RMW_(p), atomic_fetch_or_explicit((p), (v), memory_order_seq_cst))
#define atomic_fetch_and(p, v) (RMW_(p), atomic_fetch_and_explicit((p), (v), memory_order_seq_cst))
#define atomic_compare_exchange_strong(p, e, d)                                                    \
	(RMW_(p), atomic_compare_exchange_strong_explicit((p), (e), (d), memory_order_seq_cst,         \
	                                                  memory_order_seq_cst))
#define atomic_compare_exchange_weak(p, e, d) atomic_compare_exchange_strong((p), (e), (d))

/* A private heap, so that it can be put back as it was before a run. */
#define malloc(size) schedule_alloc(size)
#define calloc(n, size) schedule_alloc((size_t)(n) * (size))
#define free(p) ((void)(p))
#define mmap(at, size, prot, flags, fd, offset) schedule_map((size), (fd))
#define munmap(at, size) ((void)(at), (void)(size), 0)
#define clock_gettime(clock, t) schedule_clock((clock), (t))
#define clock_nanosleep(clock, flags, t, left) ((void)(t), schedule_pause())
#define sem_init(sem, shared, value) schedule_sem_init((sem), (value))
#define sem_destroy(sem) ((void)(sem))
#define sem_post(sem) schedule_sem_post(sem)
#define sem_trywait(sem) schedule_sem_trywait(sem)
#define sem_clockwait(sem, clock, t) ((void)(t), schedule_sem_wait(sem))

/* ---- what a test calls ---- */

#define ACTORS 4u /* at most, numbered from 0 */
#define OUTSIDE ACTORS

typedef struct scenario {
	const char *name;
	void (*act[ACTORS])(void);      /* NULL: does nothing */
	void (*settle)(void);           /* nobody can go on and somebody died: repair, ring */
	void (*verify)(void);           /* at the end; calls schedule_fail */
	bool (*asleep)(uint32_t actor); /* true: this actor may sleep for good; NULL: any may */
} scenario;

/* How far a search goes; 0 of everything: one run. */
typedef struct bounds {
	uint32_t switches; /* away from an actor that could go on */
	uint32_t deaths;
	uint32_t delays; /* stores that stay in an actor's store buffer up to the next drain */
	uint64_t most;   /* runs; 0: no limit */
} bounds;

typedef struct outcome {
	uint64_t runs, deaths;
	uint32_t points; /* accesses in the longest run */
	bool whole;      /* within the bounds everything was tried */
	char wrong[512]; /* "" or the first violation, with the choices that lead to it */
} outcome;

/* Whose locks and clients the following calls make (before schedule_begin, in settle, verify). */
void schedule_as(uint32_t actor);
/* All that exists now is what each run begins with. Once a scenario. */
void schedule_begin(void);
outcome schedule_search(const scenario *s, bounds b);
/* Forget everything that was set up. */
void schedule_reset(void);
__attribute__((format(printf, 1, 2), noreturn)) void schedule_fail(const char *format, ...);
bool schedule_is_dead(uint32_t actor);
/* Before schedule_begin: it is dead from the start. */
void schedule_kill(uint32_t actor);
/* A seeded fault, to see that it is found. */
enum fault {
	FAULT_NONE,
	FAULT_NO_OWNER_DIED, /* a lock whose holder died is given out as if it had been unlocked */
	FAULT_LOST_POST,     /* every second ring of a doorbell gets lost */
	FAULT_NO_LOCK,       /* locks exclude nobody */
	FAULT_LOST_STORE,    /* the schedule_fault_at-th store of each run gets lost */
	FAULT_NO_FENCE       /* fences do not drain */
};
extern enum fault schedule_fault;
extern uint32_t schedule_fault_at;

#endif
