/* Failures of a message: counting them, and their effects. All under the deliver lock (D) unless said
 * otherwise. */
#ifndef SHMQ_FAILURE_H
#define SHMQ_FAILURE_H

#include "memory/handles.h"
#include "memory/layout.h"

#define MOST_FAILURES UINT32_C(65535)
#define BY_POLICY INT64_C(-1) /* a delay: the queue's own retry delay */

/* How often the message has failed; 0 if it never has. */
uint32_t failures_of(const shmq_slot_desc *s);
/* Count a failure of the delivery that is IN_FLIGHT, unless it was counted before, or the count is
 * `most` or more. */
void failure_count(shmq_slot_desc *s, uint32_t most);
/* Make an IN_FLIGHT slot DEFERRED until `due` (CLOCK_REALTIME ns). */
void slot_defer(shmq_broker *b, shmq_map *map, uint32_t slot, int64_t due);
/* Make an IN_FLIGHT slot DEFERRED and CONVICTED for `reason` (enum shmq_dead_reason). The supervisor
 * moves it to the dead topic from `due` on. */
void slot_convict(shmq_broker *b, shmq_map *map, uint32_t slot, unsigned reason, int64_t due);
/* Take an IN_FLIGHT slot whose failure was counted back: convict it if it has failed too often, else
 * deliver it again, after `delay` ns or BY_POLICY. after: as for slot_requeue. */
void slot_take_back(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay);
/* The same, but without convicting it. */
void slot_acquit(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay);
/* Take an IN_FLIGHT slot back from its session without counting a failure: into the queue at once, after
 * what is published, or after `delay` ns. It is no suspect any more: its consumer has outlived it. */
void slot_give_back(shmq_broker *b, shmq_map *map, uint32_t slot, int64_t delay);
/* A delay as a caller asked for it, within [0, max_req_timeout]. */
int64_t delay_within(const shmq_broker *b, int64_t delay_ns);
/* As slot_take_back after counting a failure of its delivery; it is no suspect any more, because its consumer
 * has outlived it. */
void slot_fail(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay);

/* A suspect is handed out alone. These may be called without D as a hint. */

/* Returns true if the message at the head of the requeue ring is a suspect. */
bool suspect_is_next(shmq_map *map);
/* Returns true if the client holds a suspect of this queue, or if the next message is a suspect and
 * the client holds other messages. A gateway's sessions belong to other processes, so for it only
 * the session counts. */
bool suspect_bars(shmq_broker *b, shmq_map *map, uint32_t session);
/* Returns true if the client may be given a suspect: it holds no message of this queue. */
bool suspect_may_go(shmq_broker *b, shmq_map *map, uint32_t session);
/* Clear the queue's hint if no session holds a suspect. D is held. */
void suspects_forget(shmq_map *map);
/* Note before the slot becomes IN_FLIGHT that the session holds it as a suspect. */
void suspect_note(shmq_map *map, uint32_t session, uint32_t slot);

#endif
