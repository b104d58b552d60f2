/* Nanoseconds: deadlines in CLOCK_MONOTONIC (a step expires nothing), due times and timestamps in
 * CLOCK_REALTIME. */
#ifndef SHMQ_CLOCK_H
#define SHMQ_CLOCK_H

#include <stdint.h>
#include <time.h>

#define NS_PER_S INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

static inline int64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

static inline int64_t now_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}

/* A clock that ticks every 4 ms and costs a quarter of the exact one. The time is rounded up, so
 * that nothing expires too early. */
static inline int64_t now_coarse_ns(void)
{
	return clock_ns(CLOCK_MONOTONIC_COARSE) + 4 * NS_PER_MS;
}

static inline int64_t realtime_ns(void)
{
	return clock_ns(CLOCK_REALTIME);
}

static inline struct timespec timespec_of(int64_t ns)
{
	return (struct timespec){.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
}

/* a + b, or INT64_MAX if that overflows: an endless timeout stays endless. */
static inline int64_t later(int64_t a, int64_t b)
{
	int64_t sum;

	return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

#endif
