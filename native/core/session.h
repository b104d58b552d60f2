/* Consumers' entries in a queue. */
#ifndef SHMQ_SESSION_H
#define SHMQ_SESSION_H

#include "handles.h"

int session_open(shmq_broker *b, shmq_map *map, uint32_t max_in_flight, uint32_t *session);
/* Give back everything that `client` holds of this queue. D is held. Returns how many messages. */
uint32_t queue_return(shmq_broker *b, shmq_map *map, uint32_t client, uint32_t session);

#endif
