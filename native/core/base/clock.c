/* The two clocks, for callers outside the core. */
#include "base/clock.h"

#include "shmq.h"

int64_t shmq_now(void)
{
	return now_ns();
}

int64_t shmq_realtime(void)
{
	return realtime_ns();
}
