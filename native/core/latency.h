/* Histograms of the time from publish to finish. Under the deliver lock (D). */
#ifndef SHMQ_LATENCY_H
#define SHMQ_LATENCY_H

#include "layout.h"

void latency_turn(shmq_latency_desc *l, int64_t now);
/* A message published at `timestamp` was finished at `now` (CLOCK_REALTIME) */
void latency_record(shmq_latency_desc *l, int64_t timestamp, int64_t now);

#endif
