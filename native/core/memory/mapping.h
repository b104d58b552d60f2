/* References on mapped queues. */
#ifndef SHMQ_MAPPING_H
#define SHMQ_MAPPING_H

#include "memory/handles.h"
#include "memory/segment.h"

extern _Atomic uint32_t fork_count;

bool usable(const shmq_broker *b);
int usable_status(const shmq_broker *b);
void broker_hold(shmq_broker *b);
void broker_release(shmq_broker *b);
int map_get_serial(shmq_broker *b, uint32_t index, uint64_t serial, shmq_map **out);
/* Take a reference on the mapped queue. SHMQ_NEED_MAP (noted for shmq_broker_missing),
 * SHMQ_GONE. */
int map_get(shmq_broker *b, uint32_t index, shmq_map **out);
/* Release a reference; if the queue was removed, the broker's table releases its own too. */
void map_put(shmq_broker *b, shmq_map *map);
/* Note in the client's entry that it uses this queue, for the reaper. */
void client_note_queue(shmq_broker *b, uint32_t index);
/* Returns 0, or SHMQ_CORRUPT if the tables cannot have the lengths that the directory claims: there
 * may be live entries beyond the part that is mapped. */
int directory_whole(shmq_broker *b);
/* Set all pointers by the plan; the header is not read again. */
void map_place(shmq_map *map, const queue_plan *p);
int map_open(int fd, uint32_t index, uint64_t serial, const uint64_t instance[2], shmq_map **out);
void map_hold(shmq_map *map);
void map_release(shmq_map *map);

#endif
