/* Consumers' sessions in a queue. */
#ifndef SHMQ_SESSION_H
#define SHMQ_SESSION_H

#include "memory/handles.h"

int session_open(shmq_broker *b, shmq_map *map, uint32_t max_in_flight, uint32_t *session);
/* Give back everything that `client` holds of this queue; session: SHMQ_NONE, or only the messages
 * of that session. The deliver lock (D) is held. Returns the number of messages. */
uint32_t queue_return(shmq_broker *b, shmq_map *map, uint32_t client, uint32_t session);

#endif
