/* Histograms of the time from publish to finish. Under the deliver lock (D). */
#ifndef SHMQ_LATENCY_H
#define SHMQ_LATENCY_H

#include "layout.h"

/* Switch to the other window if the current one has been filled for half of its length. */
void latency_turn(shmq_latency_desc *l, int64_t now);
/* Count a message that was published at `timestamp` and finished at `now` (CLOCK_REALTIME ns). */
void latency_record(shmq_latency_desc *l, int64_t timestamp, int64_t now);

#endif
