/*
 * The private handles over the shared descriptors: a mapped queue segment, one process's attachment
 * to an instance, a consumer. Every file above this one works on them.
 *
 * Order of locks: registry, publish lock (P, one per topic), deliver lock (D, one per queue;
 * several by queue index). Nobody takes the registry lock under P, nor P under D. Every call that
 * takes locks has `until` (see shmq.h). A lock function that fails holds nothing.
 */
#ifndef SHMQ_HANDLES_H
#define SHMQ_HANDLES_H

#include "memory/heap.h"
#include "memory/layout.h"
#include "shmq.h"

#include <stdbool.h>

/* A mapped queue segment. The broker's table holds one reference, handles hold more. */
typedef struct shmq_map {
	_Atomic uint32_t references;
	uint32_t index;
	uint64_t serial;
	uint64_t size;
	uint8_t *base;
	shmq_queue_desc *q;
	shmq_slot_desc *slots;
	uint32_t *ready, *defer, *requeue, *free;
	heap in_flight, deferred;
	shmq_session_desc *sessions;
	shmq_lease_desc *leases;
	shmq_lease_holder_desc *lease_holders;
	shmq_latency_desc *latency;
	uint8_t *arena;
	/* The fixed words of the header, as they were when they were checked. */
	uint32_t topic, slots_max, mem_queue_size, in_flight_slots, low_water;
	uint64_t arena_max;
	/* How much of each region is known to be backed by pages, independent of the header, which may
	 * be corrupt. */
	_Atomic uint32_t slots_backed, rings_backed, sessions_backed, leases_backed;
	_Atomic uint64_t arena_backed;
} shmq_map;

struct shmq_broker {
	uint8_t *base;
	uint64_t size;
	shmq_directory_desc *d;
	shmq_client_desc *clients;
	shmq_waiter_desc *waiters;
	shmq_request_desc *requests;
	shmq_topic_desc *topics;
	shmq_entry_desc *entries;
	_Atomic int64_t *next_deadline, *next_due;
	shmq_writer_desc *writers;
	shmq_store_entry_desc *stores;
	_Atomic uint32_t clients_backed, topics_backed, queues_backed; /* entries with pages */
	uint32_t fork_generation;
	uint32_t client, client_generation;
	bool attached;
	/* The `life` lock of its client is held, by the thread life_tid. */
	bool life;
	int life_tid;
	uint32_t bell;         /* the supervisor's doorbell */
	pthread_mutex_t mutex; /* this process's: maps, idle bells */
	uint32_t idle[SHMQ_WAITERS];
	uint32_t idle_count;
	_Atomic uint32_t references; /* the handles opened on it, and the broker's own */
	_Atomic(shmq_map *) maps[SHMQ_QUEUES];
};

#define CONSUMER_BELLS 8

struct shmq_consumer {
	shmq_broker *b;
	shmq_map *map;
	int64_t msg_timeout; /* ns, INT64_MAX: never */
	uint32_t session;
	_Atomic uint32_t max_in_flight; /* 0: takes nothing */
	_Atomic bool closed;
	_Atomic uint32_t finishes;    /* calls */
	_Atomic int64_t clocks_apart; /* ns from CLOCK_MONOTONIC to CLOCK_REALTIME, at one of them */
	/* The doorbells of this process's threads that wait on it, + 1; 0: none. */
	_Atomic uint32_t waiting[CONSUMER_BELLS];
};

#endif
