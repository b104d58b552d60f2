/* Histograms of the time from publish to finish, and of its two parts: from publish to the take, and
 * from the take to the finish. Under the deliver lock (D). */
#ifndef SHMQ_LATENCY_H
#define SHMQ_LATENCY_H

#include "memory/layout.h"

/* Switch to the other window if the current one has been filled for half of its length. */
void latency_turn(shmq_latency_desc *l, int64_t now);
/* Count a message that was finished `ns` after its publish and `held` ns after its take. */
void latency_record(shmq_latency_desc *l, uint64_t ns, uint64_t held);

/* ns from `then` to `now`; 0 if the clock went back. A time read from a segment or a file may be
 * anything: no signed difference. */
static inline uint64_t latency_since(int64_t then, int64_t now)
{
	return now > then ? (uint64_t)now - (uint64_t)then : 0;
}

#endif
