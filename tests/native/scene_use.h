/*
 * Every call there is, on a scene whose shared memory may be garbage: for test_garbage and the
 * fuzzer.
 */
#ifndef SCENE_USE_H
#define SCENE_USE_H

#include "scene.h"

static scene *s;
static world *w;

/* Every status that a call returns must be in the table. */
static int known(int r)
{
	CHECK(strcmp(shmq_status_name(r), "UNKNOWN"));
	return r;
}

/* A call that says AGAIN has met garbage and has it repaired by the next one; not for ever. */
#define CALL(call)                                                                                 \
	({                                                                                             \
		int r_, tries_ = 0;                                                                        \
		do {                                                                                       \
			r_ = known(call);                                                                      \
			if (r_ == SHMQ_NEED_MAP && !may_map())                                                 \
				break;                                                                             \
		} while ((r_ == SHMQ_AGAIN || r_ == SHMQ_NEED_MAP) && ++tries_ < 4);                       \
		r_;                                                                                        \
	})

static bool may_map(void)
{
	uint32_t queue;
	uint64_t serial;

	shmq_broker_missing(s->b, &queue, &serial);
	return serial < 4096 && w->queues[serial] &&
	       !known(shmq_broker_map(s->b, queue, serial, w->queues[serial]));
}

static int64_t shortly(void)
{
	return shmq_now() + 20 * NS_PER_MS; /* a lock that looks held must not stop us long */
}

static void look_at_properties(const uint8_t *block, uint32_t length)
{
	shmq_property p;
	uint64_t at = 0;

	CHECK(length <= SHMQ_PROPERTIES_MOST);
	while (shmq_property_next(block, length, &at, &p) > 0) {
		CHECK(at <= length);
		CHECK((const uint8_t *)p.value + p.length <= block + length);
		CHECK(p.name_length <= SHMQ_PROPERTY_NAME && (const uint8_t *)p.name > block);
	}
}

/* Bodies are read as the binding reads them. */
static void look(const shmq_message *m, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		volatile const uint8_t *body = m[i].body;
		uint8_t sum = 0;

		for (uint32_t k = 0; k < m[i].length; k++)
			sum ^= body[k];
		(void)sum;
		look_at_properties((const uint8_t *)m[i].body - m[i].properties, m[i].properties);
	}
}

static void publish(shmq_producer *p)
{
	static char text[3000];
	shmq_body bodies[3] = {{text, 60}, {text, 500}, {text, 2000}};
	static const uint8_t block[] = {1, 'k', 3, 0, 'o', 'n', 'e', 3, 't', 'w', 'o', 0, 0};
	shmq_body properties[3] = {{block, sizeof(block)}, {NULL, 0}, {block, 7}};
	uint64_t id;

	(void)CALL(shmq_publish(p, bodies, 1, 0, shortly(), &id));
	(void)CALL(
			shmq_publish_on(p, bodies, 3, &(shmq_terms){.properties = properties}, shortly(), &id));
	(void)CALL(shmq_publish(p, bodies, 3, 0, shortly(), &id));
	(void)CALL(shmq_publish(p, bodies, 1, s->realtime - 12000 * NS_PER_S, shortly(), &id));
}

static void spill(enum shmq_spill_source from)
{
	static uint32_t slots[400], lengths[400];
	static uint64_t positions[400];
	static uint8_t records[200000];
	shmq_spill batch = {.slots = slots, .lengths = lengths, .positions = positions};
	int r;

	if (from == SHMQ_SPILL_CHUNK)
		r = CALL(shmq_chunk_begin(w->supervisor, s->queue[0],
		                          &(shmq_chunk_wish){.chunk = 1, .max_bytes = 10000, .n = 3},
		                          shortly(), &batch));
	else
		r = CALL(shmq_spill_begin(w->supervisor, s->queue[0], from, 6, 10000, shortly(), &batch));
	if (r)
		return;
	CHECK(batch.count <= 6 && batch.bytes <= sizeof(records));
	(void)CALL(shmq_spill_encode(w->supervisor, &batch, records));
	(void)CALL(shmq_spill_end(w->supervisor, &batch, 0, false, shortly()));
}

static void restore(void)
{
	static const uint8_t one[] = {0,   0,   0,   27,  0,   0,   0,   0,   0,   0,   0,
	                              1,   0,   1,   '0', '0', '0', '0', '0', '0', '0', '0',
	                              '0', '0', '0', '0', '0', '0', '0', '1', 'x'};
	uint64_t used, read = ld(&s->map[0]->q->disk_read);
	int64_t due = s->realtime;
	uint32_t taken;

	(void)CALL(shmq_restore(w->supervisor, s->queue[0],
	                        &(shmq_records){.data = one,
	                                        .length = sizeof(one),
	                                        .position = read,
	                                        .next_position = read + sizeof(one)},
	                        shortly(), &taken, &used));
	(void)CALL(shmq_chunk_load(
			w->supervisor, s->queue[0],
			&(shmq_chunk_records){
				.data = one, .length = sizeof(one), .dues = &due, .n = 1, .position = 1 << 24},
			shortly(), &taken));
	(void)CALL(shmq_evict_read_ahead(w->supervisor, s->queue[0], shortly(), &taken));
	(void)CALL(shmq_disk_set(w->supervisor, s->queue[0], read, read, 0, shortly()));
}

static void lease(void)
{
	shmq_lease_cursor cursor;
	shmq_lease found[4], more;
	uint64_t ids[8], size, messages;
	int64_t timestamps[8];
	int32_t attempts[8], offsets[9];
	static uint8_t data[40000];
	uint32_t count;

	if (!CALL(shmq_lease_open(s->b, s->queue[0], s->serial[0], s->lease.id, 1, &cursor)) &&
	    !CALL(shmq_lease_measure(s->b, &cursor, 8, sizeof(data), &count, &size))) {
		CHECK(count <= 8 && size <= sizeof(data));
		(void)CALL(shmq_lease_copy(s->b, &cursor, count, size,
		                           &(shmq_columns){.ids = ids,
		                                           .timestamps = timestamps,
		                                           .attempts = attempts,
		                                           .offsets = offsets,
		                                           .data = data}));
	}
	(void)CALL(shmq_lease_look(s->b, &s->holder, s->lease.id, true, shortly(), &more));
	(void)CALL(shmq_lease_list(s->b, &s->holder, found, 4, shortly(), &count));
	if (!CALL(shmq_lease_take(s->b, &s->holder,
	                          &(shmq_lease_wish){.max_bytes = 1000, .n = 3, .parts = 2}, shortly(),
	                          &more)))
		(void)CALL(shmq_lease_finish(s->b, &s->holder, more.id, shortly(), &messages));
	(void)CALL(shmq_lease_return(s->b, &s->holder, s->lease.id, shortly(), &messages));
	(void)CALL(shmq_lease_holder_touch(s->b, &s->holder, shortly()));
	(void)CALL(shmq_lease_holder_adopt(s->b, &s->holder, shortly()));
}

/* No matter what became of channel c. */
static void the_one_beside_has_all(void)
{
	uint32_t got;
	shmq_message m[20];

	EQUAL(shmq_take(s->o, m, 20, soon(), &got), 0);
	EQUAL(got, 10);
	for (int k = 0; k < 10; k++)
		EQUAL(scene_number(&m[k]), k);
	EQUAL(shmq_finish(s->o, m, got, NULL, soon()), 0);
}

static void publish_some(void)
{
	publish(s->p);
}

static void loan(void)
{
	shmq_loan *l;
	uint64_t id;

	if (CALL(shmq_loan_begin(s->p, 10000, shortly(), &l)))
		return;
	memset(shmq_loan_data(l), 1, 10000);
	if (CALL(shmq_loan_commit(l, 0, shortly(), &id)))
		(void)CALL(shmq_loan_cancel(l, shortly()));
	shmq_loan_free(l);
}

static void take(void)
{
	shmq_message m[10];
	uint32_t got;

	if (CALL(shmq_take(s->c, m, 10, shortly(), &got)))
		return;
	CHECK(got <= 10);
	look(m, got);
	if (got < 5)
		return;
	(void)CALL(shmq_touch(s->c, m, got, NULL, shortly()));
	(void)CALL(shmq_requeue(s->c, m, 1, 0, NULL, shortly()));
	(void)CALL(shmq_requeue(s->c, m + 1, 1, NS_PER_S, NULL, shortly()));
	if (!CALL(shmq_pin(s->c, m + 2, shortly())))
		(void)CALL(shmq_unpin(s->c, m + 2, shortly()));
	(void)CALL(shmq_finish(s->c, m + 2, 1, NULL, shortly()));
}

static void unpin(void)
{
	(void)CALL(shmq_unpin(s->c, &s->pinned, shortly()));
}

static void spill_ready_ones(void)
{
	spill(SHMQ_SPILL_READY);
}

static void spill_returned_ones(void)
{
	spill(SHMQ_SPILL_REQUEUED);
}

static void spill_everything(void)
{
	spill(SHMQ_SPILL_ALL);
}

static void prepend_flush(void)
{
	spill(SHMQ_SPILL_PREPEND_FLUSH);
}

static void prepend(void)
{
	spill(SHMQ_SPILL_PREPEND);
}

static void spill_what_was_out(void)
{
	spill(SHMQ_SPILL_DELIVERED);
}

static void spill_to_a_chunk(void)
{
	spill(SHMQ_SPILL_CHUNK);
}

static void scan(void)
{
	uint32_t n, expired, due;

	(void)CALL(shmq_stage_oldest(w->supervisor, s->queue[0], 3, shortly(), &n));
	(void)CALL(
			shmq_expire(w->supervisor, s->queue[0],
			            &(shmq_expiry){.now = s->monotonic, .realtime = s->realtime, .limit = 100},
			            shortly(), &expired, &due));
}

static void take_away(void)
{
	shmq_held m = {.serial = s->serial[0], .queue = s->queue[0]};
	shmq_message taken[3];
	uint32_t got;

	if (CALL(shmq_take(s->c, taken, 3, shortly(), &got)))
		return;
	for (uint32_t i = 0; i < got; i++) {
		m.id = taken[i].id;
		(void)(i ? CALL(shmq_held_requeue(s->b, &m, i == 1 ? 0 : NS_PER_S, shortly()))
		         : CALL(shmq_held_finish(s->b, &m, shortly())));
	}
}

static void another_consumer(void)
{
	shmq_consumer *other;
	shmq_message m[20];
	uint32_t got;

	if (CALL(shmq_consumer_open(s->b, s->queue[0], s->serial[0], 5, 0, shortly(), &other)))
		return;
	if (!CALL(shmq_take(other, m, 20, shortly(), &got)))
		look(m, got);
	(void)CALL(shmq_consumer_wait(other, 1));
	(void)CALL(shmq_consumer_close(other, shortly()));
	shmq_consumer_free(other);
}

static void pump_and_audit(void)
{
	uint32_t n;
	bool repaired;

	(void)CALL(shmq_pump(w->supervisor, s->topic, s->generation, 5, shortly(), &n));
	(void)CALL(shmq_audit(w->supervisor, s->queue[0], shortly(), &repaired));
}

static void registry(void)
{
	uint32_t n, got;
	uint64_t serial;

	(void)CALL(shmq_topic_find(s->b, "t", &n, &got));
	(void)CALL(shmq_queue_find(s->b, s->topic, "c", &n, &serial));
	(void)CALL(shmq_channel_pause(s->b, s->queue[0], s->serial[0], false, shortly()));
	(void)CALL(shmq_topic_pause(s->b, s->topic, s->generation, false, shortly()));
}

static void request(void)
{
	shmq_request asked;
	uint32_t n;

	(void)shmq_supervisor_alive(s->b);
	if (CALL(shmq_request_post(s->b, SHMQ_CREATE_TOPIC, "new", NULL, shortly(), &n)))
		return;
	if (!shmq_request_next(w->supervisor, shortly(), &asked))
		shmq_request_answer(w->supervisor, asked.ticket % SHMQ_REQUESTS, 0, NULL);
	(void)CALL(shmq_request_wait(s->b, n, 1));
	shmq_request_end(s->b, n);
}

static void rebuild(void)
{
	(void)CALL(shmq_rebuild(w->supervisor, s->queue[0], shortly()));
}

static void adopt(void)
{
	(void)CALL(shmq_adopt(w->supervisor, s->queue[0], shortly()));
}

static void empty(void)
{
	uint64_t dropped;

	(void)CALL(shmq_queue_empty(s->b, s->queue[0], s->serial[0], shortly(), &dropped));
}

/* The calls of clients and of a supervisor. */
static void (*const operations[])(void) = {
	publish_some,
	loan,
	take,
	unpin,
	lease,
	spill_ready_ones,
	spill_returned_ones,
	spill_everything,
	prepend_flush,
	prepend,
	spill_what_was_out,
	spill_to_a_chunk,
	restore,
	scan,
	take_away,
	another_consumer,
	pump_and_audit,
	registry,
	request,
	publish_some,
	rebuild,
	adopt,
	empty,
	publish_some,
};
#define OPERATIONS (sizeof(operations) / sizeof(operations[0]))

#endif
