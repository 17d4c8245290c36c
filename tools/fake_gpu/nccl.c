/* NCCL between ranks that never meet: one rank runs at a time.

   Each rank writes into the folder FAKE_NCCL what it exchanges, for the command to compare: real ranks would wait for
   ever where their lists differ. */

#include "gpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SMALL_MESSAGE 65536
static const size_t TYPE_SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static const char *folder;
static int this_rank = 0;
typedef struct { char bytes[128]; } Id;

__attribute__((constructor)) static void read_environment(void) { folder = getenv("FAKE_NCCL"); }

/* Write down what this rank does together with the others. */
void fake_note(const char *what) {
  static FILE *log;
  char path[4096];
  if (!folder) return;
  pthread_mutex_lock(&mutex);
  if (!log) {
    snprintf(path, sizeof path, "%s/rank%d", folder, this_rank);
    log = fopen(path, "a");
  }
  fprintf(log, "%s\n", what);
  fflush(log);
  pthread_mutex_unlock(&mutex);
}

static int collective(const char *name, size_t n, int type) {
  char what[80];
  snprintf(what, sizeof what, "%s of %zu numbers of type %d", name, n, type);
  fake_note(what);
  return launch(NCCL);
}

/* Figures are summed and gathered as if all ranks had this rank's. Python objects go through files: see process.py. */
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *comm, void *stream) {
  return collective("broadcast", n, type);
}

int ncclBcast(void *data, size_t n, int type, int root, void *comm, void *stream) {
  return ncclBroadcast(data, data, n, type, root, comm, stream);
}

int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
  int counts_ranks = n == 1 && type == 4 && op == 0;  /* a sum of one int64: all ranks say the same */
  if (counts_ranks) LOCKED(finish_copies(); *(int64_t *)to = *(int64_t *)from * n_ranks)
  return collective("all-reduce", n, type);
}

int ncclAllGather(const char *from, char *to, size_t n, int type, void *comm, void *stream) {
  size_t bytes = n * TYPE_SIZE[type];
  pthread_mutex_lock(&mutex);
  finish_copies();
  for (int rank = 0; rank < n_ranks && bytes <= SMALL_MESSAGE; rank++) memmove(to + rank * bytes, from, bytes);
  pthread_mutex_unlock(&mutex);
  return collective("all-gather", n, type);
}

int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
  return collective("reduce-scatter", n, type);
}

int ncclCommInitRankConfig(void **comm, int n, Id id, int rank, void *config) {
  n_ranks = n;
  this_rank = rank;
  return handle(comm);
}

int ncclGetUniqueId(Id *id) { memset(id, 1, sizeof *id); return 0; }
int ncclCommSplit(void *comm, int color, int key, void **out, void *config) { return handle(out); }
int ncclCommCount(void *comm, int *n) { *n = n_ranks; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = this_rank; return 0; }
int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
int ncclGetVersion(int *version) { *version = 22809; return 0; }
const char *ncclGetErrorString(int error) { return "an error of the fake NCCL"; }
const char *ncclGetLastError(void *comm) { return ""; }
