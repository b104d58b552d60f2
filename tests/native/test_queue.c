/* Publish, take, finish, requeue, touch, expire, pause, empty in one process. */
#include "one_queue.h"

#include <signal.h>

static shmq_message take(stage *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, 0, &got), 0);
	return m;
}

static void messages_come_in_order_and_finish_once(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	shmq_message m;
	uint32_t got;
	char text[32];

	for (int round = 0; round < 5; round++) {
		for (int i = 0; i < 700; i++) {
			snprintf(text, sizeof(text), "message %d", i);
			EQUAL(world_publish(x.w, x.b, x.p, text), 0);
		}
		for (int i = 0; i < 700; i++) {
			snprintf(text, sizeof(text), "message %d", i);
			m = take(&x);
			CHECK(body_is(&m, text));
			EQUAL(m.attempts, 1);
			EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
			EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
		}
		EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY);
	}
	stage_close(x);
}

static void a_full_queue_says_so_and_has_room_again(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m;
	int n = 0;

	while (world_publish(x.w, x.b, x.p, "x") == 0)
		n++;
	EQUAL(n, 300);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), SHMQ_FULL);
	m = take(&x);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	stage_close(x);
}

static void a_requeued_message_waits_its_turn(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m;

	EQUAL(world_publish(x.w, x.b, x.p, "a"), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "b"), 0);
	m = take(&x);
	CHECK(body_is(&m, "a"));
	EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, 0), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "c"), 0);
	m = take(&x);
	CHECK(body_is(&m, "b"));
	m = take(&x);
	CHECK(body_is(&m, "a"));
	EQUAL(m.attempts, 2);
	m = take(&x);
	CHECK(body_is(&m, "c"));
	stage_close(x);
}

static void timed_out_messages_come_back_and_late_finish_fails(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m, again;
	uint32_t expired, due;

	EQUAL(world_publish(x.w, x.b, x.p, "a"), 0);
	m = take(&x);
	EQUAL(shmq_expire(x.w->supervisor, x.queue,
	                  &(shmq_expiry){.now = shmq_now(), .realtime = shmq_realtime(), .limit = 10},
	                  soon(), &expired, &due),
	      0);
	EQUAL(expired, 0);
	EQUAL(shmq_expire(x.w->supervisor, x.queue,
	                  &(shmq_expiry){.now = shmq_now() + 61 * NS_PER_S,
	                                 .realtime = shmq_realtime(),
	                                 .limit = 10},
	                  soon(), &expired, &due),
	      0);
	EQUAL(expired, 1);
	CHECK(!shmq_message_is_ours(x.c, &m));
	again = take(&x);
	EQUAL(again.attempts, 2);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_finish(x.c, &again, 1, NULL, 0), 0);
	stage_close(x);
}

/* Somebody else, who names its id. */
static shmq_held held(const stage *x, const shmq_message *m)
{
	return (shmq_held){.serial = x->serial, .id = m->id, .queue = x->queue};
}

static void leave(stage *x, shmq_broker *other)
{
	EQUAL(MAPPED(x->w, other, shmq_broker_detach(other, soon())), 0);
	shmq_broker_close(other);
}

static void check_counts(stage *x, uint32_t in_flight, uint64_t finished, uint64_t requeued)
{
	EQUAL(ld(&world_view(x->w, x->queue)->sessions[x->c->session].in_flight), in_flight);
	EQUAL(ld(&x->q->in_flight_len), in_flight);
	EQUAL(ld(&x->q->finished), finished);
	EQUAL(ld(&x->q->requeued), requeued);
	SOUND(x->w);
}

static void what_another_holds_is_finished_once(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_broker *other = world_attach(x.w, SHMQ_AS_CLIENT);
	shmq_message m, left;
	shmq_held it;
	uint32_t got;

	EQUAL(world_publish(x.w, x.b, x.p, "a"), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "b"), 0);
	m = take(&x);
	left = take(&x);
	EQUAL(shmq_pin(x.c, &m, 0), 0);
	it = held(&x, &m);
	it.pid = 1;
	EQUAL(MAPPED(x.w, other, shmq_held_finish(other, &it, soon())), SHMQ_NOT_IN_FLIGHT);
	it.pid = x.b->clients[x.b->client].pid;
	check_counts(&x, 2, 0, 0);
	EQUAL(shmq_held_finish(other, &it, soon()), 0);
	EQUAL(shmq_held_finish(other, &it, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_held_requeue(other, &it, 0, soon()), SHMQ_NOT_IN_FLIGHT);
	check_counts(&x, 1, 1, 0);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_requeue(x.c, &m, 1, 0, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_touch(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	CHECK(body_is(&m, "a")); /* its view is pinned */
	EQUAL(shmq_unpin(x.c, &m, 0), 0);
	EQUAL(shmq_finish(x.c, &left, 1, NULL, 0), 0);
	EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY);
	check_counts(&x, 0, 2, 0);
	leave(&x, other);
	stage_close(x);
}

static void what_another_holds_is_requeued_and_has_not_failed(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_broker *other = world_attach(x.w, SHMQ_AS_CLIENT);
	shmq_settings strict = {.max_attempts = 1};
	shmq_message m, again;
	uint32_t got, expired, due;
	shmq_held it;

	EQUAL(shmq_queue_configure(x.b, x.queue, x.serial, NULL, &strict, soon()), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "a"), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "b"), 0);
	m = take(&x);
	it = held(&x, &m);
	EQUAL(MAPPED(x.w, other, shmq_held_requeue(other, &it, -1, soon())), 0);
	check_counts(&x, 0, 0, 1);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	again = take(&x);
	CHECK(body_is(&again, "b")); /* it waits its turn */
	EQUAL(shmq_finish(x.c, &again, 1, NULL, 0), 0);
	again = take(&x);
	EQUAL(again.id, m.id);
	EQUAL(again.attempts, 2);
	EQUAL(shmq_held_requeue(other, &it, 60 * NS_PER_S, soon()), 0);
	EQUAL(shmq_held_requeue(other, &it, 60 * NS_PER_S, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY);
	check_counts(&x, 0, 1, 2);
	EQUAL(shmq_expire(x.s, x.queue, &(shmq_expiry){.realtime = INT64_MAX, .limit = 10}, soon(),
	                  &expired, &due),
	      0);
	EQUAL(due, 1);
	m = take(&x);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	leave(&x, other);
	stage_close(x);
}

static void deferred_messages_wait_until_they_are_due(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_body body = {"later", 5};
	int64_t due_at = shmq_realtime() + 3600 * NS_PER_S;
	uint32_t expired, due, got;
	shmq_message m;
	uint64_t id;

	EQUAL(shmq_publish(x.p, &body, 1, due_at, 0, &id), 0);
	EQUAL(ld(&x.b->next_due[x.queue]), due_at);
	EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY);
	EQUAL(shmq_expire(x.w->supervisor, x.queue, &(shmq_expiry){.realtime = due_at, .limit = 10},
	                  soon(), &expired, &due),
	      0);
	EQUAL(due, 1);
	m = take(&x);
	CHECK(body_is(&m, "later"));
	EQUAL(shmq_requeue(x.c, &m, 1, 5 * NS_PER_S, NULL, 0), 0);
	EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY);
	EQUAL(shmq_expire(x.w->supervisor, x.queue,
	                  &(shmq_expiry){.realtime = shmq_realtime() + 6 * NS_PER_S, .limit = 10},
	                  soon(), &expired, &due),
	      0);
	EQUAL(due, 1);
	m = take(&x);
	EQUAL(m.attempts, 2);
	stage_close(x);
}

static void large_bodies_and_loans_come_whole(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	size_t size = 300000;
	char *data = malloc(size);
	shmq_body body = {data, size};
	shmq_message m;
	shmq_loan *loan;
	uint64_t id;

	memset(data, 'L', size);
	for (int i = 0; i < 60; i++) {
		EQUAL(shmq_publish(x.p, &body, 1, 0, soon(), &id), 0);
		m = take(&x);
		EQUAL(m.length, size);
		CHECK(!memcmp(m.body, data, size));
		EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
		EQUAL(shmq_loan_begin(x.p, 1000 + (uint64_t)i, 0, &loan), 0);
		memset(shmq_loan_data(loan), 'l', 1000 + (size_t)i);
		EQUAL(shmq_loan_commit(loan, 0, 0, &id), 0);
		shmq_loan_free(loan);
		m = take(&x);
		EQUAL(m.length, 1000 + i);
		EQUAL(m.id, id);
		EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
		EQUAL(shmq_loan_begin(x.p, 5000, 0, &loan), 0);
		EQUAL(shmq_loan_cancel(loan, 0), 0);
		shmq_loan_free(loan);
	}
	body.length = 2 << 20;
	EQUAL(shmq_publish(x.p, &body, 1, 0, soon(), &id), SHMQ_TOO_BIG);
	free(data);
	stage_close(x);
}

static void pinned_bodies_stay_though_finished(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m;

	EQUAL(world_publish(x.w, x.b, x.p, "pinned"), 0);
	m = take(&x);
	EQUAL(shmq_pin(x.c, &m, 0), 0);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	for (int i = 0; i < 2000; i++) {
		shmq_message other;

		EQUAL(world_publish(x.w, x.b, x.p, "another"), 0);
		other = take(&x);
		EQUAL(shmq_finish(x.c, &other, 1, NULL, 0), 0);
	}
	EQUAL(MAPPED(x.w, x.w->supervisor, shmq_rebuild(x.w->supervisor, x.queue, soon())), 0);
	CHECK(body_is(&m, "pinned"));
	EQUAL(shmq_unpin(x.c, &m, 0), 0);
	EQUAL(MAPPED(x.w, x.w->supervisor, shmq_rebuild(x.w->supervisor, x.queue, soon())), 0);
	stage_close(x);
}

static void spilled_messages_come_back_in_order(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t slots[600], lengths[600], moved, taken;
	uint64_t positions[600], at = 0, used;
	shmq_spill s = {.slots = slots, .lengths = lengths, .positions = positions};
	uint8_t *disk = malloc(1 << 20);
	shmq_message m;
	uint32_t got;
	char text[32];

	for (int i = 0; i < 1000; i++) {
		snprintf(text, sizeof(text), "message %d", i);
		EQUAL(world_publish(x.w, x.b, x.p, text), 0);
	}
	EQUAL(shmq_stage_oldest(x.w->supervisor, x.queue, 250, soon(), &moved), 0);
	EQUAL(moved, 250);
	EQUAL(shmq_spill_begin(x.w->supervisor, x.queue, SHMQ_SPILL_READY, 600, 1 << 20, soon(), &s),
	      0);
	EQUAL(s.count, 600);
	EQUAL(shmq_spill_encode(x.w->supervisor, &s, disk), 0);
	for (uint32_t i = 0; i < s.count; at += lengths[i++])
		positions[i] = at;
	EQUAL(shmq_spill_end(x.w->supervisor, &s, at, true, soon()), 0);
	for (int i = 0; i < 250; i++) {
		snprintf(text, sizeof(text), "message %d", i);
		m = take(&x);
		CHECK(body_is(&m, text));
		EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	}
	EQUAL(shmq_take(x.c, &m, 1, 0, &got), SHMQ_EMPTY); /* the rest waits for the disk */
	EQUAL(shmq_restore(x.w->supervisor, x.queue,
	                   &(shmq_records){.data = disk, .length = at, .next_position = at}, soon(),
	                   &taken, &used),
	      0);
	EQUAL(taken, 600);
	EQUAL(used, at);
	for (int i = 250; i < 1000; i++) {
		snprintf(text, sizeof(text), "message %d", i);
		m = take(&x);
		CHECK(body_is(&m, text));
		EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	}
	free(disk);
	stage_close(x);
}

static void empty_drops_all_but_what_is_viewed(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_message m;
	uint64_t dropped;

	for (int i = 0; i < 10; i++)
		EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	m = take(&x);
	EQUAL(shmq_queue_empty(x.b, x.queue, x.serial, soon(), &dropped), 0);
	EQUAL(dropped, 10);
	EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), SHMQ_NOT_IN_FLIGHT);
	EQUAL(world_publish(x.w, x.b, x.p, "y"), 0);
	m = take(&x);
	CHECK(body_is(&m, "y"));
	stage_close(x);
}

static void a_killed_consumers_messages_go_back_first(void)
{
	stage x = stage_open(small_limits(300, 300), "c");
	shmq_dead dead[4];
	uint32_t found, returned;
	shmq_message m;
	pid_t child;
	int status;

	for (int i = 0; i < 10; i++)
		EQUAL(world_publish(x.w, x.b, x.p, i < 5 ? "first" : "second"), 0);
	child = fork();
	if (!child) {
		shmq_broker *b = world_attach(x.w, SHMQ_AS_CLIENT);
		shmq_consumer *c = world_consumer(x.w, b, x.queue, x.serial, 100);
		shmq_message mine[5];
		uint32_t got;

		EQUAL(shmq_take(c, mine, 5, soon(), &got), 0);
		EQUAL(got, 5);
		EQUAL(lock_take(&b->topics[x.topic].publish, 0),
		      0); /* and dies with the publish lock and the deliver lock held */
		EQUAL(lock_take(&ld(&b->maps[x.queue])->q->deliver, 0), 0);
		raise(SIGKILL);
	}
	EQUAL(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status));
	EQUAL(shmq_reap_scan(x.w->supervisor, dead, 4, &found), 0);
	EQUAL(found, 1);
	EQUAL(dead[0].pid, child);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_reap(x.w->supervisor, dead[0].client, dead[0].generation, soon(), &returned)),
	      0);
	EQUAL(returned, 5);
	for (int i = 0; i < 10; i++) {
		m = take(&x);
		CHECK(body_is(&m, i < 5 ? "first" : "second"));
		EQUAL(m.attempts, i < 5 ? 2 : 1);
		EQUAL(shmq_finish(x.c, &m, 1, NULL, 0), 0);
	}
	stage_close(x);
}

int main(void)
{
	messages_come_in_order_and_finish_once();
	a_full_queue_says_so_and_has_room_again();
	a_requeued_message_waits_its_turn();
	timed_out_messages_come_back_and_late_finish_fails();
	what_another_holds_is_finished_once();
	what_another_holds_is_requeued_and_has_not_failed();
	deferred_messages_wait_until_they_are_due();
	large_bodies_and_loans_come_whole();
	pinned_bodies_stay_though_finished();
	spilled_messages_come_back_in_order();
	empty_drops_all_but_what_is_viewed();
	a_killed_consumers_messages_go_back_first();
	return 0;
}
