"""Wrong connectors of handoffs: the list, written before the checks and the reference connector.

Producer
 1 OffersWithoutHolding       the blocks are free at once                            vllm#46951
 2 ReleasesAtTheFirstRead     blocks are freed when the pages are sent, not read     sglang#24527
 3 ReleasesAtTheDeadline      the lease ends a handoff that is being read            vllm#47021
 4 ReaperStopsAtALiveLease    leases are thought to be in the order of deadlines     vllm#58222
 5 LeasesNeverEnd             a consumer that died keeps the blocks                  vllm#38027
 6 OffersAborted              an aborted prefill is offered, and nobody takes it     vllm#29906
 7 NamesOffersByRequest       a request id that is reused replaces the older offer   vllm#51637
 8 ServesConsumed             the block ids of the parameters are read at any time   vllm#52234
 9 ServesExpired              a read after the lease is only logged                  aws-do-eks#84
10 IgnoresTheLife             numbers start again after a restart                    smg#2491
11 ServesTheLatest            an unknown handoff gets the pages of another           vllm#52234
12 FreesTwice                 a repeated receipt frees the blocks again              vllm#42571
13 ReceiptByPrefix            a receipt ends the other offer of the same prompt      vllm#51637
14 AnyReceiptEnds             a receipt of another consumer ends a read              sglang#37077
15 FreesUnderASend            a return frees the blocks while they are sent          sglang#24580
16 ForgetsABlock              all blocks but the last are freed                      vllm#43742
17 HoldsOneGroup              the blocks of the other groups are not held            vllm#53498
18 OffersTheNullBlock         blocks that a window has freed are offered             vllm#42571
19 OffersUncomputed           the last block, not yet full, is offered               ascend#8427
20 ReversesBlocks             blocks are sent in the order of freeing
21 KeepsAtShutdown            offers are not released at shutdown
22 ResetFreesOffers           a cache reset frees offered blocks                     vllm#46951
23 BytesInParameters          a hash is passed on as bytes                           vllm#36644
24 ForgetsTheLife             parameters do not name the life                        smg#2491
25 SleepsWithOffers           no pending work: an idle engine never ends a lease     LMC#4998
26 SecondReaderIsServed       two consumers read; the first receipt ends both        sglang#22716
27 SendsOneShort              the last page is not sent                              vllm#50754

Consumer
28 SuccessOfFailed            a failed transfer is reported as a success             vllm#52234
29 SuccessOfCut               pages that arrived are written, others ignored         vllm#40364
30 AnyReplyCounts             a reply is not compared with the load                  sglang#22716
31 WritesLatePages            pages are written after the load was reported          sglang#24527
32 ConfirmsBeforePages        the receipt goes out with the request                  sglang#24527
33 NeverConfirms              the producer always waits for its lease                vllm#53095
34 KeepsWhenAborted           an abort in the queue does not return the handoff      vllm#19223
35 KeepsOnHit                 a full hit on the GPU does not return the handoff      vllm#19223
36 DropsAbortedLoads          an aborted load is never reported                      ascend#16662
37 WaitsForever               no timeout: the producer is gone                       vllm#26171
38 PromisesForeignTokens      the prefix is not compared                             vllm#52234
39 IgnoresTheLayout           pages of other block sizes are copied                  sglang#19353
40 StartsAtTheFirstPage       a hit on the GPU shifts the pages                      vllm#32204
41 RepliesByRequest           replies are matched by request id                      vllm#51637
42 RaisesOnBadParameters      a missing entry ends the engine                        vllm#13214
43 CachesAddresses            the first address of an engine is used forever         smg#2491
44 ReportsTwice               a repeated reply reports the load again                vllm#53450
45 HalfIsEnough               one group arrived: the load is a success               vllm#52234
46 UsesRemoteBlockIds         pages are written to the producer's block numbers
47 NeverRetries               a lost request fails the load only                     vllm#50754
48 TrustsBytes                pages with a wrong checksum are written                sglang#23020
"""
