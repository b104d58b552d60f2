/* The states of a lease. All under the deliver lock (D). */
#ifndef SHMQ_LEASE_H
#define SHMQ_LEASE_H

#include "memory/handles.h"

#define BITE 4096u
#define WORD(state, id) ((uint64_t)(state) | (uint64_t)(id) << 8)
#define LEASE_STATE(word) ((unsigned)((word) & 0xff))
#define LEASE_ID(word) ((word) >> 8)

bool lease_any(shmq_map *map);
shmq_lease_desc *lease_entry(shmq_map *map, uint64_t id);
/* Returns true if the records at the read position are leased: the position does not move then. */
bool lease_has_run(shmq_map *map);
int lease_run_check(const shmq_map *map, const shmq_run *run);
/* Add the run after the gathered messages, if nothing else comes before it. */
void lease_run_take(shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n, uint64_t max_bytes,
                    const shmq_run *from);
/* Decide a LEASED slot in a rebuild. Returns its next state and sets its fields for it. */
unsigned lease_resolve(shmq_map *map, shmq_slot_desc *s);
/* Free the entries that were decided, after every slot was resolved. */
void lease_resolved(shmq_map *map);
/* Free up to `most` slots of a finished lease. Returns false if some are left. */
bool lease_free_some(shmq_map *map, shmq_lease_desc *e, uint32_t most);
void lease_mark_finished(shmq_map *map, shmq_lease_desc *e);
/* Returns false, with nothing done, if the requeue ring's head is garbage; the next locker
 * repairs it. */
bool lease_return(shmq_map *map, shmq_lease_desc *e);
shmq_lease_desc *lease_oldest(shmq_map *map, uint32_t holder, uint64_t above);
void lease_return_all(shmq_map *map);
/* When leases need attention next: CLOCK_MONOTONIC ns, INT64_MAX for never. */
int64_t lease_deadline(shmq_map *map);
/* Return the leases whose time is over, and free those that are finished. */
void lease_expire(shmq_map *map, int64_t now, uint32_t limit, uint32_t *returned);
/* Take the client off its names: their leases wait for the next incarnation. */
void lease_orphan(shmq_broker *b, shmq_map *map, uint32_t client);
/* Back the two lease tables with pages if they are not backed yet. */
int lease_tables_commit(shmq_map *map);
/* The entry of the name, or one for it; NULL if there is no room. */
shmq_lease_holder_desc *lease_holder_find(shmq_map *map, const shmq_lease_settings *settings);
/* Whether the holder has no open lease. */
bool lease_none_of(shmq_map *map, uint32_t holder);
/* The open leases of all holders that are of the same `whose`. */
uint32_t leases_of(shmq_map *map, uint64_t whose);
void lease_describe(const shmq_lease_desc *e, shmq_lease *out);
/* The next lease id whose entry is free, and that entry. */
shmq_lease_desc *lease_entry_new(shmq_map *map, uint64_t *id);
/* Take messages into the lease while there are some. Their slots are noted in the requeue ring
 * after its tail, which is scratch space. */
uint32_t lease_gather(shmq_broker *b, shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n,
                      uint64_t max_bytes);
/* Store where each part begins in memory: shares of equal size, or nothing. */
void lease_split(shmq_map *map, shmq_lease_desc *e);
void deadline_note(shmq_broker *b, shmq_map *map);

#endif
