/* Locking the registry, a topic's publish lock (P) and a queue's deliver lock (D). A function that
 * fails holds nothing. */
#ifndef SHMQ_LOCKING_H
#define SHMQ_LOCKING_H

#include "memory/handles.h"

int registry_lock(shmq_broker *b, int64_t until);
void registry_unlock(shmq_broker *b);
void queue_unlock(shmq_map *map);
/* Take the deliver lock (D) while the publish lock (P) of its topic is held. */
int queue_lock_under(shmq_broker *b, shmq_map *map, int64_t until);
/* Take D while P of another topic is held. clean: false if the queue has to be repaired, which needs
 * P of its own topic; give D back then, and P, and call queue_lock. */
int queue_lock_beside(shmq_map *map, int64_t until, bool *clean);
int topic_lock(shmq_broker *b, shmq_topic_desc *t, int64_t until);
void topic_unlock(shmq_topic_desc *t);
/* Take the deliver lock (D) alone; a dirty queue is repaired first, under P and D. SHMQ_GONE if
 * the queue was removed. */
int queue_lock(shmq_broker *b, shmq_map *map, int64_t until);
/* Take the publish lock (P) and the deliver lock (D). */
int both_lock(shmq_broker *b, shmq_map *map, int64_t until);
void both_unlock(shmq_broker *b, shmq_map *map);
/* Enter a queue: take a reference on its mapping, note that this client uses it, and take D; or P and
 * D (both). Leave it with queue_unlock or both_unlock, and map_release. */
int queue_enter(shmq_broker *b, uint32_t queue, int64_t until, shmq_map **out);
int both_enter(shmq_broker *b, uint32_t queue, int64_t until, shmq_map **out);
/* The same for a client that names the queue by its serial, too; SHMQ_FORKED, SHMQ_CLOSED. */
int queue_enter_serial(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                       shmq_map **out);

#endif
