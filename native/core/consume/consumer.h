/* The parts of a consumer that a thread waiting for several consumers uses. */
#ifndef SHMQ_CONSUMER_H
#define SHMQ_CONSUMER_H

#include "memory/handles.h"

/* Returns true if there is something to take, or to report (closed, gone, dirty). Needs no lock. */
bool may_take(shmq_consumer *c);
/* Enter this thread's doorbell among those that shmq_consumer_wake rings. Returns false if the
 * list is full. */
bool consumer_enter(shmq_consumer *c, uint32_t bell);
void consumer_leave(shmq_consumer *c, uint32_t bell);

#endif
