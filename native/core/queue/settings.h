/* The policies of a queue or topic: two copies, and one word that says which of them holds. */
#ifndef SHMQ_SETTINGS_H
#define SHMQ_SETTINGS_H

#include "base/atomics.h"
#include "memory/handles.h"

/* Returns 0 if the settings make sense; SHMQ_INVALID or SHMQ_BAD_NAME with a sentence. */
int settings_check(const shmq_settings *s);
/* Returns true for nsqd's rules and no others, sealed or not. */
bool settings_are_none(const shmq_settings *s);
bool settings_equal(const shmq_settings *a, const shmq_settings *b);
/* Write the copy that does not hold, then turn the word. Under P and D, or before the queue is
 * ready. death: the old settings hold, or the new ones. */
void settings_store(shmq_queue_desc *q, const shmq_settings *s);
shmq_settings settings_load(shmq_queue_desc *q);
/* The same for the queues that a topic gets later, under P, or before the topic is live. */
void topic_settings_store(shmq_topic_desc *t, const shmq_settings *s);
shmq_settings topic_settings_load(shmq_topic_desc *t);

/* The settings that hold. Under P or D. */
static inline const shmq_settings_desc *settings_of(const shmq_map *map)
{
	return &map->q->settings[ld(&map->q->policy) & SHMQ_POLICY_SECOND];
}

/* Returns true if the queue has any of these policies (bits of enum shmq_policy). */
static inline bool has_policy(const shmq_map *map, uint32_t policies)
{
	return ld(&map->q->policy) & policies;
}

/* How long messages live, ns; INT64_MAX: for ever, also if a policy word that was overwritten tells
 * of a time to live that the settings do not have. Such garbage must expire nothing. */
static inline int64_t message_ttl_of(const shmq_map *map)
{
	int64_t ttl = settings_of(map)->message_ttl;

	return ttl > 0 ? ttl : INT64_MAX;
}

#endif
