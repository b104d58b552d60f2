/* The counterexamples of docs/model: publishing, loans, backlogs and ids. */
#include "counterexample.h"

/* A loan gets its place in the order at its commit. Until then it survives rebuilds and spills. */
static void a_loan_has_its_number_from_its_commit(void)
{
	stage *x = setup();
	shmq_loan *loan;
	uint64_t id;

	publish(x, "a");
	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	*(char *)shmq_loan_data(loan) = 'z';
	publish(x, "bc");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	end_spill(x);
	rebuild(x);
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	SOUND(x->w);
	for (int i = 0; i < 200; i++) { /* nobody else gets its slot or its bytes */
		EQUAL(*(char *)shmq_loan_data(loan), 'z');
		publish(x, "-");
	}
	EQUAL(shmq_loan_commit(loan, 0, soon(), &id), 0);
	shmq_loan_free(loan);
	restore_all(x);
	expect(x, "abc");
	for (int i = 0; i < 200; i++)
		expect(x, "-");
	expect(x, "z");
	teardown(x);
}

/* A refusal takes nothing. */
static void a_refused_publish_takes_no_slot_anywhere(void)
{
	stage *x = setup();
	uint64_t serial;
	shmq_queue_desc *other = world_view(x->w, world_queue(x->w, x->topic, "d", &serial))->q;
	shmq_consumer *c = world_consumer(x->w, x->b, 1, serial, 1000);
	uint32_t head, got;
	shmq_message m;

	for (int i = 0; i < 300; i++) {
		publish(x, "x");
		EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	}
	head = ld(&other->free_head);
	for (int i = 0; i < 5; i++)
		EQUAL(world_publish(x->w, x->b, x->p, "y"), SHMQ_FULL);
	EQUAL(ld(&other->free_head), head);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void a_loans_channels_are_read_again_at_its_commit(void)
{
	stage *x = setup();
	uint64_t id, gone, come;
	uint32_t queue = world_queue(x->w, x->topic, "gone", &gone), got;
	shmq_consumer *c;
	shmq_loan *loan;
	shmq_message m;

	EQUAL(MAPPED(x->w, x->b, shmq_loan_begin(x->p, 1, soon(), &loan)), 0);
	*(char *)shmq_loan_data(loan) = 'z';
	EQUAL(shmq_queue_remove(x->s, queue, gone, false, soon()), 0);
	queue = world_queue(x->w, x->topic, "come", &come);
	EQUAL(MAPPED(x->w, x->b, shmq_loan_commit(loan, 0, soon(), &id)), 0);
	shmq_loan_free(loan);
	expect(x, "z");
	c = world_consumer(x->w, x->b, queue, come, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "z"));
	EQUAL(m.id, id);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void a_take_over_half_done_is_still_a_backlog(void)
{
	world *w = world_start(small_limits(300, 100));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, again, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;
	uint64_t serial, other;

	queue = world_queue(w, topic, NULL, &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "a"), 0);
	strcpy(b->entries[queue].name, "c"); /* named; dead before the role was stored */
	st(&world_view(w, queue)->q->base_pending, 1);
	EQUAL(shmq_queue_find(b, topic, "c", &again, &other), SHMQ_GONE);
	EQUAL(shmq_queue_find(b, topic, NULL, &again, &other), 0);
	EQUAL(world_publish(w, b, p, "b"), 0);
	EQUAL(shmq_queue_take_over(w->supervisor, topic, "d", NULL, soon(), &again, &other), 0);
	EQUAL(again, queue);
	EQUAL(shmq_queue_find(b, topic, "d", &again, &other), 0);
	c = world_consumer(w, b, queue, serial, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "a"));
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

static void the_commit_word_decides_what_was_being_moved(void)
{
	stage *x = setup();
	uint64_t committed, serial;
	uint32_t moved;
	shmq_map *backlog;
	shmq_slot_desc *s;

	EQUAL(shmq_topic_pause(x->b, x->topic, x->generation, true, soon()), 0);
	backlog = world_view(x->w, world_queue(x->w, x->topic, NULL, &serial));
	publish(x, "ab");
	committed = ld(&x->b->topics[x->topic].committed);
	s = &backlog->slots[backlog->ready[ld(&backlog->q->ready_head) & ld(&backlog->q->ring_mask)]];
	s->previous = SHMQ_READY;
	s->move = committed + 1; /* not decided */
	st(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	EQUAL(shmq_rebuild(x->s, backlog->index, soon()), 0);
	EQUAL(SHMQ_STATE_OF(ld(&s->word)), SHMQ_READY);
	SOUND(x->w);
	s->move = committed; /* decided: it is in the channels */
	st(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	EQUAL(shmq_rebuild(x->s, backlog->index, soon()), 0);
	EQUAL(SHMQ_STATE_OF(ld(&s->word)), SHMQ_FREE);
	SOUND(x->w);
	EQUAL(shmq_topic_pause(x->b, x->topic, x->generation, false, soon()), 0);
	publish(x, "c"); /* after b, which is still in the backlog */
	EQUAL(MAPPED(x->w, x->s, shmq_pump(x->s, x->topic, x->generation, 10, soon(), &moved)), 0);
	EQUAL(moved, 2);
	publish(x, "d");
	expect(x, "bcd");
	teardown(x);
}

static void empty_leaves_what_is_lent_or_viewed(void)
{
	stage *x = setup();
	shmq_body later = {"later", 5};
	shmq_message m, pinned;
	shmq_loan *loan;
	uint64_t dropped, id;

	publish(x, "abcdef");
	pinned = take(x);
	EQUAL(shmq_pin(x->c, &pinned, soon()), 0);
	EQUAL(shmq_finish(x->c, &pinned, 1, NULL, soon()), 0);
	m = take(x);
	EQUAL(shmq_requeue(x->c, &m, 1, 0, NULL, soon()), 0);
	m = take(x);
	EQUAL(shmq_publish(x->p, &later, 1, shmq_realtime() + NS_PER_S, soon(), &id), 0);
	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	begin_spill(x, 1, SHMQ_SPILL_READY);
	EQUAL(shmq_queue_empty(x->b, x->queue, x->serial, soon(), &dropped), 0);
	EQUAL(dropped, 6);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_spill_end(x->s, &x->spill, x->spill.bytes, true, soon()), SHMQ_GONE);
	CHECK(body_is(&pinned, "a"));
	SOUND(x->w);
	*(char *)shmq_loan_data(loan) = 'z';
	EQUAL(shmq_loan_commit(loan, 0, soon(), &id), 0);
	shmq_loan_free(loan);
	EQUAL(shmq_unpin(x->c, &pinned, soon()), 0);
	expect(x, "z");
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

/* The publisher of a deferred message died between the commit and the flip. */
static void a_decided_deferred_message_is_deferred_by_the_rebuild(void)
{
	stage *x = setup();
	shmq_body body = {"d", 1};
	int64_t due_at = shmq_realtime() + NS_PER_S;
	uint32_t slot, expired, due;
	uint64_t id;

	EQUAL(shmq_publish(x->p, &body, 1, due_at, soon(), &id), 0);
	slot = x->map->defer[ld(&x->q->defer_head) & ld(&x->q->ring_mask)];
	st(&x->map->slots[slot].word, word_next(ld(&x->map->slots[slot].word), SHMQ_PREPARED));
	st(&x->q->defer_tail, ld(&x->q->defer_head));
	rebuild(x);
	SOUND(x->w);
	nothing_to_take(x);
	EQUAL(shmq_expire(x->s, x->queue, &(shmq_expiry){.realtime = due_at, .limit = 10}, soon(),
	                  &expired, &due),
	      0);
	EQUAL(due, 1);
	expect(x, "d");
	teardown(x);
}

static void ids_rise_whatever_the_clock_and_the_past_say(void)
{
	stage *x = setup();
	uint64_t ahead = (uint64_t)(shmq_realtime() - SHMQ_EPOCH_NS) / SHMQ_ID_UNIT_NS +
	                 (UINT64_C(1) << 36);
	shmq_body bodies[3] = {{"a", 1}, {"b", 1}, {"c", 1}};
	uint32_t topic, generation, queue;
	uint64_t first, next, serial;
	shmq_producer *p;

	EQUAL(shmq_topic_create(x->s, "u", ahead, NULL, soon(), &topic, &generation), 0);
	queue = world_queue(x->w, topic, "c", &serial);
	EQUAL(shmq_producer_open(x->b, topic, generation, &p), 0);
	EQUAL(MAPPED(x->w, x->b, shmq_publish(p, bodies, 3, 0, soon(), &first)), 0);
	EQUAL(first >> SHMQ_ID_NODE_BITS, ahead + 1);
	EQUAL(first & 1023, 5);
	EQUAL(ld(&x->b->topics[topic].id_clock), ahead + 3);
	/* dead between the clock's store and the commit: the numbers are not given again */
	st(&x->b->topics[topic].id_clock, ahead + 103);
	EQUAL(shmq_publish(p, bodies, 1, 0, soon(), &next), 0);
	EQUAL(next >> SHMQ_ID_NODE_BITS, ahead + 104);
	EQUAL(shmq_rebuild(x->s, queue, soon()), 0);
	EQUAL(ld(&x->b->topics[topic].id_clock), ahead + 104);
	shmq_producer_close(p);
	teardown(x);
}

int main(void)
{
	a_loan_has_its_number_from_its_commit();
	a_refused_publish_takes_no_slot_anywhere();
	a_loans_channels_are_read_again_at_its_commit();
	a_take_over_half_done_is_still_a_backlog();
	the_commit_word_decides_what_was_being_moved();
	empty_leaves_what_is_lent_or_viewed();
	a_decided_deferred_message_is_deferred_by_the_rebuild();
	ids_rise_whatever_the_clock_and_the_past_say();
	return 0;
}
