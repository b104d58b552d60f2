/* The layout as a table, for numpy, for the fingerprint and for the golden test. */
#include "base/libc.h"
#include "memory/heap.h"
#include "shmq.h"
#include "shmq_store.h"
#include "shmq_supervisor.h"

#include <string.h>
#include <unistd.h>

#define STRUCT(name) shmq_##name##_desc
#define SIZE_OF(s, f) ((uint32_t)sizeof(((STRUCT(s) *)0)->f))
#define F(s, f, dtype) {#s, #f, dtype, (uint32_t)offsetof(STRUCT(s), f), SIZE_OF(s, f), 1},
#define A(s, f, dtype, n)                                                                          \
	{#s, #f, dtype, (uint32_t)offsetof(STRUCT(s), f), (uint32_t)(SIZE_OF(s, f) / (n)), (n)},

#define U4(s, f) F(s, f, "<u4")
#define U8(s, f) F(s, f, "<u8")
#define I8(s, f) F(s, f, "<i8")

static const shmq_field fields[] = {
	/* clang-format off */
	U8(segment, magic) U4(segment, layout_version) U4(segment, kind) U8(segment, fingerprint)
	A(segment, boot_id, "<u8", 2) A(segment, instance, "<u8", 2) U8(segment, size)
	U8(segment, serial) U4(segment, ready) U4(segment, page_size)

	U8(slot, word) U8(slot, id) I8(slot, timestamp) U8(slot, order) I8(slot, deadline)
	U8(slot, body) U4(slot, length) U4(slot, capacity) U4(slot, heap) F(slot, attempts, "<u2")
	F(slot, previous, "u1") F(slot, flags, "u1") U8(slot, after) U8(slot, pos) U8(slot, move) I8(slot, delivered)
	U4(slot, session) U4(slot, pins) U4(slot, next) U4(slot, turn)
	U4(slot, failures) U4(slot, properties) I8(slot, expires)

	U8(waitset, summary) U4(waitset, rotor) A(waitset, words, "<u8", SHMQ_WAITERS / 64)

	U4(client, state) U4(client, generation) F(client, pid, "<i4") U4(client, kind)
	U8(client, start_time) U8(client, program) U8(client, pid_namespace) I8(client, attached_at)
	U4(client, orphan) U4(client, pins_high) U4(client, uid) F(client, life, "V64")
	A(client, touched, "<u8", SHMQ_QUEUES / 64) A(client, pins, "<u8", SHMQ_PINS)

	U8(waiter, owner) F(waiter, bell, "V32") U4(waiter, turn) U4(waiter, names)
	A(waiter, hints, "<u8", SHMQ_HINTS / 64)

	U4(request, state) U4(request, op) U4(request, client) U4(request, waiter)
	F(request, status, "<i4") F(request, topic, "S80") F(request, channel, "S80")
	A(request, numbers, "<u8", 2)

	U8(settings, max_messages) U8(settings, max_bytes) I8(settings, message_ttl)
	I8(settings, retry_first) I8(settings, retry_most) U4(settings, max_attempts)
	U4(settings, overflow) U4(settings, flags) F(settings, dead_letter, "S80")

	U4(topic, state) U4(topic, generation) U4(topic, flags) U4(topic, paused)
	F(topic, name, "S80") U8(topic, version) F(topic, publish, "V64") U8(topic, committed)
	U8(topic, id_clock) U4(topic, dirty) U4(topic, moving) U8(topic, messages) U8(topic, bytes)
	U4(topic, policy) A(topic, settings, "settings", 2)

	U4(entry, state) U4(entry, generation) U8(entry, serial) U4(entry, topic) U4(entry, flags)
	U4(entry, role) F(entry, name, "S80") U8(entry, size)

	U4(store_entry, state) U4(store_entry, generation) U8(store_entry, serial)
	U8(store_entry, max_bytes) U4(store_entry, max_keys) U4(store_entry, flags)
	F(store_entry, name, "S80")

	I8(limits, msg_timeout) I8(limits, max_msg_timeout) I8(limits, max_req_timeout)
	U8(limits, max_msg_size) U4(limits, node_id) U4(limits, mem_queue_size)
	U4(limits, in_flight_slots) U8(limits, arena_size)

	F(directory, segment, "segment") F(directory, limits, "limits") F(directory, registry, "V64")
	U8(directory, clients_at) U8(directory, waiters_at) U8(directory, requests_at)
	U8(directory, topics_at) U8(directory, queues_at) U8(directory, deadline_at)
	U8(directory, due_at) U4(directory, clients_committed) U4(directory, topics_committed)
	U4(directory, queues_committed) U4(directory, waiters_high) U8(directory, generation)
	U8(directory, next_serial) F(directory, supervisor_pid, "<i4")
	U4(directory, supervisor_client) U8(directory, supervisor_start_time)
	I8(directory, supervisor_since) I8(directory, heartbeat) U4(directory, supervisor_waiter)
	U4(directory, epoch) U4(directory, stopping) U4(directory, requested) U8(directory, reaped)
	U8(directory, rebuilt) U8(directory, pid_namespace) U8(directory, writers_at)
	I8(directory, scan_deadline) I8(directory, scan_due)
	U8(directory, names_written) U8(directory, names_replaced)
	F(directory, data_path, "S1024") U8(directory, disk_trouble)
	U8(directory, stores_at) A(directory, seal_key, "<u8", 4)
	A(directory, spiller_pending, "<u8", SHMQ_QUEUES / 64)

	U4(session, client) U4(session, generation) U4(session, max_in_flight) U4(session, in_flight)
	I8(session, since) U8(session, delivered) U8(session, finished) U8(session, requeued)
	U8(session, timed_out) U4(session, suspect)

	U8(lease, word) U8(lease, parent) U8(lease, bytes) I8(lease, since) U8(lease, base)
	U4(lease, holder) U4(lease, count) U4(lease, parts) U4(lease, replays) U4(lease, at)
	U4(lease, left) A(lease, first, "<u4", SHMQ_LEASE_PARTS) U4(lease, on_disk)

	U8(run, lease) U8(run, from) U8(run, to) U8(run, bytes) U8(run, count)
	A(run, at, "<u8", SHMQ_LEASE_PARTS)

	U4(lease_holder, state) U4(lease_holder, client) U8(lease_holder, incarnation) I8(lease_holder, ttl)
	I8(lease_holder, grace) I8(lease_holder, deadline) U8(lease_holder, start_time) F(lease_holder, pid, "<i4")
	U8(lease_holder, finished) U8(lease_holder, lost) F(lease_holder, name, "S80")
	A(lease_holder, proof, "<u8", 2) U8(lease_holder, whose)

	U8(writer, topic) A(writer, key, "<u8", 2) U8(writer, used) U8(writer, epoch)
	U8(writer, rows) U8(writer, next_epoch) U8(writer, next_rows) U8(writer, next_seq) U8(writer, whose)

	I8(histogram, since) U8(histogram, count) U8(histogram, sum)
	A(histogram, buckets, "<u8", SHMQ_LATENCY_BUCKETS)

	U4(latency, current) F(latency, total, "histogram") A(latency, window, "histogram", 2)
	A(latency, held_total, "<u4", SHMQ_PARTS_BUCKETS) A(latency, held_wait, "<u4", SHMQ_PARTS_BUCKETS)
	A(latency, processing, "<u4", SHMQ_PARTS_BUCKETS)

	U4(arena, fl) U8(arena, free_bytes) A(arena, sl, "<u1", SHMQ_ARENA_FL)
	A(arena, heads, "<u8", SHMQ_ARENA_FL * SHMQ_ARENA_SL)

	F(queue, segment, "segment") U4(queue, index) U4(queue, topic) U4(queue, slots_max)
	U4(queue, mem_queue_size) U4(queue, in_flight_slots) U4(queue, flags) U8(queue, arena_max)
	U8(queue, slots_at) U8(queue, ready_at) U8(queue, defer_at) U8(queue, requeue_at)
	U8(queue, free_at) U8(queue, in_flight_when_at) U8(queue, in_flight_slot_at)
	U8(queue, deferred_when_at) U8(queue, deferred_slot_at) U8(queue, sessions_at)
	U8(queue, leases_at) U8(queue, latency_at) U8(queue, arena_at) U8(queue, lease_holders_at)
	U4(queue, low_water) U4(queue, slots_committed)
	U4(queue, ring_mask) U4(queue, sessions_committed) U4(queue, dirty) U4(queue, paused)
	U4(queue, policy) A(queue, settings, "settings", 2) I8(queue, next_expiry) U8(queue, expired)
	U8(queue, dead_lettered) U8(queue, dropped_oldest) U8(queue, rejected)
	U4(queue, suspects)
	U8(queue, disk_write) U8(queue, disk_read) U8(queue, disk_depth) U4(queue, spilling)
	U8(queue, deferred_write) U8(queue, deferred_read) U8(queue, deferred_gone)
	U8(queue, deferred_depth) U4(queue, overflowed) U4(queue, base_pending) U4(queue, ready_tail) U4(queue, defer_tail)
	U4(queue, free_head) U4(queue, bodies_reclaimed_to) U4(queue, free_tail_cached) U4(queue, bodies_prepared_to)
	U4(queue, ready_head_cached) U8(queue, arena_committed) U8(queue, enqueued)
	U8(queue, enqueued_bytes) U8(queue, dropped) U8(queue, need_bytes) U4(queue, need_slots)
	U8(queue, ready_bytes_in) U8(queue, ready_bytes_out)
	U4(queue, ready_head) U4(queue, defer_head) U4(queue, requeue_head) U4(queue, requeue_tail)
	U4(queue, free_tail) U4(queue, in_flight_len) U4(queue, deferred_len) U4(queue, in_use)
	U8(queue, in_use_bytes) U8(queue, order) U8(queue, delivered) U8(queue, finished)
	U8(queue, requeued) U8(queue, timed_out) U8(queue, returned) U8(queue, spilled)
	U8(queue, restored) U4(queue, leases_committed) U8(queue, lease_id) U4(queue, leased)
	U4(queue, ready_tail_cached) U4(queue, requeue_head_group_end)
	U4(queue, spilling_count) F(queue, deliver, "V64")
	F(queue, takers, "waitset") F(queue, space, "waitset") F(queue, base, "S144")
	F(queue, run, "run") U8(queue, delivered_on_disk)
	F(queue, arena, "arena")

	U8(result, word) U8(result, hash) U8(result, body) I8(result, expires) U4(result, capacity)
	U4(result, length) U4(result, next) F(result, key_length, "<u2")

	F(stripe, waiters, "waitset") U4(stripe, stored)

	F(store, segment, "segment") U4(store, index) U4(store, max_keys) U4(store, entries_max)
	U4(store, flags) U8(store, max_bytes) U8(store, max_value) U8(store, arena_max)
	U8(store, buckets_at) U8(store, entries_at) U8(store, arena_at) A(store, seed, "<u8", 2)
	F(store, name, "S80") F(store, lock, "V64") U4(store, dirty) U4(store, entries_committed)
	U8(store, arena_committed) U8(store, sequence) U4(store, free) U4(store, keys)
	U8(store, bytes) I8(store, next_expiry) I8(store, sweep_earliest) U4(store, sweep_at)
	U8(store, stored) U8(store, removed) U8(store, expired) U8(store, refused)
	F(store, arena, "arena") A(store, stripes, "stripe", SHMQ_STORE_STRIPES)
	/* clang-format on */
};

static const struct {
	const char *name;
	uint32_t size;
} sizes[] = {
#define S(s) {#s, (uint32_t)sizeof(STRUCT(s))},
	/* clang-format off */
	S(segment) S(slot) S(waitset) S(client) S(waiter) S(request) S(settings) S(topic) S(entry)
	S(limits) S(directory) S(session) S(lease) S(run) S(lease_holder) S(writer) S(histogram) S(latency) S(arena)
	S(queue)
	S(store_entry) S(result) S(stripe) S(store)
/* clang-format on */
#undef S
};

const shmq_field *shmq_layout(size_t *count)
{
	*count = sizeof(fields) / sizeof(fields[0]);
	return fields;
}

uint32_t shmq_layout_size(const char *structure)
{
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		if (!strcmp(sizes[i].name, structure))
			return sizes[i].size;
	return 0;
}

uint32_t shmq_layout_version(void)
{
	return SHMQ_LAYOUT_VERSION;
}

static uint64_t mix(uint64_t hash, const void *data, size_t size)
{
	const uint8_t *at = data;

	while (size--)
		hash = (hash ^ *at++) * UINT64_C(1099511628211);
	return hash;
}

/* Two builds that disagree about any byte refuse each other (LMDB's idea). */
uint64_t shmq_layout_fingerprint(void)
{
	uint64_t hash = UINT64_C(14695981039346656037);
	const char *libc = libc_name();
	uint32_t facts[] = {SHMQ_LAYOUT_VERSION,
	                    (uint32_t)sysconf(_SC_PAGESIZE),
	                    (uint32_t)sizeof(pthread_mutex_t),
	                    (uint32_t)sizeof(sem_t),
	                    SHMQ_CLIENTS,
	                    SHMQ_WAITERS,
	                    SHMQ_REQUESTS,
	                    SHMQ_TOPICS,
	                    SHMQ_QUEUES,
	                    SHMQ_SESSIONS,
	                    SHMQ_HEAP_WAYS,
	                    SHMQ_LEASES,
	                    SHMQ_LEASE_HOLDERS,
	                    SHMQ_WRITERS,
	                    SHMQ_STORES,
	                    SHMQ_STORE_STRIPES};

	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
		hash = mix(hash, fields[i].name, strlen(fields[i].name));
		hash = mix(hash, &fields[i].offset, sizeof(uint32_t));
		hash = mix(hash, &fields[i].size, sizeof(uint32_t));
	}
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		hash = mix(hash, &sizes[i].size, sizeof(uint32_t));
	hash = mix(hash, facts, sizeof(facts));
	return mix(hash, libc, strlen(libc));
}

const shmq_constant *shmq_constants(size_t *count)
{
#define C(name)                                                                                    \
	{                                                                                              \
		#name, SHMQ_##name                                                                         \
	}
	static const shmq_constant constants[] = {
		/* clang-format off */
		C(MAGIC), C(LAYOUT_VERSION), C(CLIENTS), C(WAITERS), C(HINTS), C(REQUESTS), C(TOPICS), C(QUEUES),
		C(SESSIONS), C(LEASES), C(LEASE_HOLDERS), C(WRITERS), C(LEASE_PARTS), C(LEASE_FREE),
		C(LEASE_TAKING), C(LEASE_HELD), C(LEASE_FINISHED), C(LEASE_RETURNED), C(PINS), C(NONE), C(SEGMENT_DIRECTORY), C(SEGMENT_QUEUE), C(SEGMENT_STORE), C(RAW_STATE),
		C(READY_STATE), C(CLOSED_STATE), C(FREE), C(LOANED), C(PREPARED), C(READY), C(IN_FLIGHT),
		C(PINNED), C(DEFERRED), C(REQUEUED), C(SPILLING), C(RESTORED), C(MOVING), C(LEASED), C(STATES),
		C(CLIENT_FREE), C(CLIENT_LIVE), C(AS_CLIENT), C(AS_SUPERVISOR),
		C(AS_GATEWAY), C(REQUEST_FREE), C(REQUEST_POSTED),
		C(REQUEST_DONE), C(REQUEST_ABANDONED), C(CREATE_TOPIC), C(CREATE_CHANNEL),
		C(CREATE_BACKLOG), C(DELETE_TOPIC), C(DELETE_CHANNEL), C(CREATE_STORE), C(DELETE_STORE), C(JOIN_CHANNEL), C(TURN_PLAIN),
		C(TURN_AWAKE), C(TURN_ASLEEP), C(TURN_LIMITED), C(STORES),
		C(STORE_STRIPES), C(STORE_KEYS_MAX), C(KEY_MOST), C(ENTRY_FREE), C(ENTRY_LIVE),
		C(ENTRY_DELETING), C(ENTRY_ERASING), C(FLAG_EPHEMERAL), C(FLAG_DEAD), C(DUE_CONVICTED), C(ROLE_BACKLOG), C(ROLE_CHANNEL), C(HEAP_WAYS), C(TRANSIT),
		C(EPOCH_NS), C(ID_UNIT_NS), C(ID_NODE_BITS), C(CHUNK_SHIFT), C(LARGE), C(LATENCY_BUCKETS), C(LATENCY_FIRST), C(PARTS_BUCKETS), C(PARTS_FIRST), C(ARENA_UNIT), C(ARENA_HEAD),
		C(POS_SHIFT), C(RECORD_HEAD), C(RECORD_MORE), C(ENVELOPE), C(PROPERTIES_MOST), C(PROPERTY_NAME), C(RING_REQUEST), C(RING_SPILLER),
		C(RING_LEFT), C(RING_CHANGED), C(RING_DEADLINE), C(SPILL_READY), C(SPILL_ALL),
		C(SPILL_PREPEND_FLUSH), C(SPILL_PREPEND), C(SPILL_REQUEUED), C(SPILL_DELIVERED),
		C(OVERFLOW_DISK), C(OVERFLOW_BLOCK), C(OVERFLOW_REJECT), C(OVERFLOW_DROP_OLDEST),
		C(OVERFLOW_DROP_NEWEST), C(EXPIRED_TO_DEAD), C(OVERFLOW_TO_DEAD), C(SEALED_ONLY), C(SLOT_FAILED),
		C(SLOT_EXPIRES), C(SLOT_PROPERTIES), C(SLOT_SEALED), C(SLOT_SUSPECT), C(SLOT_WAS_DUE), C(SLOT_CONVICTED), C(SLOT_REASON_SHIFT),
		C(DEAD_ATTEMPTS), C(DEAD_REJECTED), C(DEAD_EXPIRED), C(DEAD_OVERFLOW), C(POLICY_SECOND),
		C(POLICY_LIMITS), C(POLICY_EXPIRY), C(POLICY_FAILURES), C(POLICY_BYTES), C(POLICY_MEMORY),
		C(SLOTS_MAX), C(ARENA_MAX), C(LOCK_HOLDER),
		/* clang-format on */
	};
#undef C
	*count = sizeof(constants) / sizeof(constants[0]);
	return constants;
}
