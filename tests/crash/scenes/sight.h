/*
 * The promises, read from bytes alone: slots, rings, heaps, locks, records on disk, and the ledger.
 * Shares no code with the core but layout.h. Each says the first thing that is not so (wrong).
 */
#ifndef SIGHT_H
#define SIGHT_H

#include "scene.h"

/* Structure of every queue: checker.h. */
void see_structure(const scene *s, const char *when);
/*
 * Where every message is, in memory or on disk: lost, twice, torn, half published, back after its
 * finish, out of turn, too early, under two ids.
 */
void see_messages(const scene *s, const char *when);
/* No dead process holds a lock: each can be taken (by pthread_mutex_trylock). */
void see_locks(const scene *s);
/* Nothing is left of a queue: every slot is FREE. */
void see_empty(const scene *s);

#endif
