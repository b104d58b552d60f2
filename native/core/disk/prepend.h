/* Writing messages in front of those on disk. Under the deliver lock (D). */
#ifndef SHMQ_PREPEND_H
#define SHMQ_PREPEND_H

#include "memory/handles.h"
#include "shmq_supervisor.h"

/* Collect the messages in flight, by delivery, in the requeue ring after `tail`, which is
 * scratch space. */
bool gather_in_flight(shmq_map *map, uint32_t tail, uint32_t n);
/*
 * Sort the requeue ring: delivered messages first, then never-delivered ones in the order of
 * publishing. The latter were read from just before the read position, so they can be written back
 * there; the former have lost their place in the order anyway. Example: the disk begins at 5, the
 * ring holds 3, 9 (delivered), 4, 7 (delivered). After the sort it holds 9, 7, 3, 4.
 */
bool requeue_sort(shmq_map *map);
/*
 * Mark the messages to be written before the read position.
 *
 * PREPEND_FLUSH: the messages in flight, by delivery, then the requeue ring, because that is the
 * order in which they would be delivered. PREPEND: the messages at the end of the requeue ring that
 * wait for no other. A message that was never delivered has a place in the order, and after
 * requeue_sort it is among the youngest; so the messages that do not fit, or wait for others, may
 * stay in memory and come before it.
 */
int prepend_begin(shmq_map *map, uint32_t n, shmq_spill *out);
int prepend_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until);

#endif
