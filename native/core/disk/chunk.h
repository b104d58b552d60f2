/* Chunks of deferred messages. */
#ifndef SHMQ_CHUNK_H
#define SHMQ_CHUNK_H

#include "memory/handles.h"
#include "shmq_supervisor.h"

int chunk_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until);

#endif
