/*
 * The operations: each function of the contract that stores to shared memory, in a scene where it
 * has much to do. One file per noun has its operations and the steps that lead to them; a step that
 * another file needs is here.
 */
#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "scene.h"

typedef struct operations {
	const operation *table;
	uint32_t count;
} operations;

extern const operations publish_operations, consume_operations, lease_operations, spill_operations,
		chunk_operations, topic_operations, client_operations, supervisor_operations,
		dead_operations, limit_operations, lanes_operations, store_operations;

/* All of them, one after the other. */
uint32_t operation_count(void);
const operation *operation_at(uint32_t i);
/* NULL: none has that name. */
const operation *operation_named(const char *name);

#define BELL 5u /* the doorbell on which somebody waits */

static inline uint32_t first_queue(const scene *s)
{
	return s->ledger->queue[0].index;
}

/* ---- in operations_publish.c ---- */

void wait_on_first(scene *s, shmq_broker *b, uint32_t bell);
void somebody_waits(scene *s);
void lend(scene *s);
void with_properties(scene *s);
void with_seals(scene *s);

/* ---- in operations_consume.c ---- */

void take(scene *s, uint32_t n);
void come_and_take(scene *s);
void eight_more(scene *s);
void take_alive(scene *s, uint32_t n);
void some_came_back(scene *s);
void some_are_deferred(scene *s);
void four_are_deferred(scene *s);
void much_came_and_went(scene *s);
void finish_one(scene *s);
void come_take_and_pin(scene *s);

/* ---- in operations_lease.c ---- */

void lease_alive(scene *s);
void leases_are_whole(scene *s);
void somebody_died_leasing(scene *s);

/* ---- in operations_spill.c ---- */

void stage_oldest(scene *s, shmq_broker *b, uint32_t n);
void stage_four(scene *s);
void spill_begin(scene *s, shmq_broker *b, enum shmq_spill_source from, uint32_t n);
void spill_end(scene *s, shmq_broker *b);
void a_bit_of_everything(scene *s);
void come_and_spill(scene *s);

/* ---- in operations_chunk.c ---- */

void everything_and_a_chunk(scene *s);
void half_a_chunk(scene *s);
void the_chunk_ends(scene *s);

/* ---- in operations_client.c ---- */

void somebody_asks(scene *s);
void no_request_is_left(scene *s);
void a_death(scene *s, void (*ready)(scene *), unsigned locks);
void somebody_died(scene *s);

/* A dead topic with a channel, which is queue 1. */
void a_dead_topic(scene *s);

#endif
