"""The scenarios of Tarantool's own replication tests that a node must pass, and the tests that cover them.

Sections: A bootstrap, B join, C the stream, D anonymous replicas, E orphans, F conflicts, G the collection of logs,
H synchronous transactions, I elections, J promotion and demotion, K split brain, L files. Many are covered by tests of
a real server or of the component; the rest is in this directory, with the id of the scenario at the start of the
docstring. Known killers are bugs of other systems, named by their tickets. Every one is tested with unmodified nodes;
those with real servers that know elections, 2.11 and later, need such a server. H13 is half covered: synchronous system
spaces appeared in 3.x.
"""

from __future__ import annotations

from typing import Final

SCENARIOS: Final[dict[str, tuple[str, ...]]] = {
    # Guests may replicate if they have the role.
    "A2": ("interop/test_bootstrap.py::test_members_without_users_bootstrap_a_mesh",),
    # Late, empty instances join the one that has data.
    "A3": ("interop/test_bootstrap.py::test_late_empty_members_join_the_bootstrapped_one",),
    # A read-only member does not lead.
    "A4": ("interop/test_bootstrap.py::test_read_only_member_does_not_lead_despite_its_smaller_uuid",),
    # A voter does not lead; the candidate does.
    "A7": (
        "scenarios/test_bootstrap.py::test_voter_does_not_bootstrap_despite_its_smaller_uuid",
        "scenarios/test_bootstrap.py::test_real_candidate_leads_and_becomes_writable_next_to_a_node",
        "interop/test_bootstrap.py::test_real_candidate_leads_and_a_voter_node_joins_it",
        "interop/test_elections.py::test_a_candidate_is_elected_by_voters_of_the_other_kind",
        "replication/membership/test_bootstrap_leader.py::test_voter_does_not_lead_if_there_is_a_candidate",
    ),
    # Strategy config: by URI, UUID or name; other members are ignored.
    "A10": (
        "scenarios/test_bootstrap.py::test_members_wait_only_for_the_configured_leader",
        "scenarios/test_bootstrap.py::test_configured_bootstrap_leader_starts_alone",
        "scenarios/test_bootstrap.py::test_unknown_leader_is_a_startup_error",
        "scenarios/test_bootstrap.py::test_real_leader_is_joined_by_its_name",
    ),
    # A greeting with the nil UUID.
    "A12": (
        "scenarios/test_bootstrap.py::test_peer_without_a_uuid_is_retried_until_it_has_one",
        "scenarios/test_bootstrap.py::test_running_replica_reports_a_peer_without_a_uuid",
    ),
    # A peer that does not greet.
    "A13": ("scenarios/test_bootstrap.py::test_silent_peer_is_dropped_after_four_timeouts_and_retried",),
    # A peer that rejects ID.
    "A14": ("scenarios/test_bootstrap.py::test_master_that_rejects_the_id_request_is_joined_and_followed",),
    # A join during writes.
    "B1": (
        "interop/test_join.py::test_replica_that_joins_during_writes_has_every_row_once",
        "simulation/test_replication.py::test_replica_joins_a_writing_master_with_data",
    ),
    # A join without the newest snapshot file.
    "B2": ("interop/test_join.py::test_join_needs_no_snapshot_file",),
    # Synchronous rows and verdicts in the final stage.
    "B3": (
        "scenarios/test_join.py::test_verdicts_on_synchronous_rows_may_arrive_during_a_join",
        "scenarios/test_join.py::test_replica_joins_the_owner_of_the_queue_during_synchronous_writes",
        "scenarios/test_join.py::test_a_join_waits_for_the_verdict_of_the_owner",
        "node/downstream/test_join_server.py::test_join_waits_for_verdicts_on_pending_transactions",
        "node/downstream/test_join_server.py::test_join_fails_with_the_transaction_it_waits_for",
        "node/downstream/test_join_server.py::test_confirm_in_the_final_stage_is_sent_to_2_6_as_a_nop",
    ),
    # Term and queue arrive with a join.
    "B4": (
        "scenarios/test_join.py::test_term_and_queue_arrive_with_a_join_and_persist",
        "scenarios/test_join.py::test_joining_candidate_does_not_disturb_a_leading_node",
        "scenarios/test_join.py::test_node_that_joins_a_real_leader_has_its_term_and_does_not_disturb_it",
        "interop/test_elections.py::test_joining_member_knows_owner_and_term_and_does_not_disturb_the_set",
    ),
    "B5": (
        "scenarios/test_join.py::test_term_and_queue_arrive_with_a_join_and_persist",
        "scenarios/test_join.py::test_node_that_joined_a_node_is_promoted_without_a_split_brain",
        "scenarios/test_join.py::test_real_replica_that_joined_a_node_is_promoted_without_a_split_brain",
    ),
    # The row of the joining replica is deleted and inserted during its join.
    "B6": ("scenarios/test_join.py::test_replica_removed_during_its_join_becomes_a_member",),
    # Two joins with the same UUID.
    "B7": ("scenarios/test_join.py::test_second_join_of_a_uuid_is_rejected_during_the_first",),
    # An empty password.
    "B10": ("interop/test_join.py::test_user_without_password_can_replicate",),
    # A snapshot cut in the middle.
    "B13": (
        "scenarios/test_join.py::test_partial_snapshot_is_not_accepted",
        "scenarios/test_join.py::test_member_keeps_its_data_when_a_rejoin_fails",
        "interop/test_join.py::test_interrupted_join_leaves_no_partial_replica",
    ),
    # Names of 3.x in a replica set of 2.x.
    "B14": (
        "scenarios/test_join.py::test_keys_of_newer_servers_are_kept_and_relayed",
        "scenarios/test_join.py::test_names_of_real_members_are_kept_by_a_node_and_relayed_to_real_replicas",
        (
            "scenarios/test_join.py::"
            "test_named_real_instance_cannot_join_an_older_schema_and_an_unnamed_one_follows_both_ways"
        ),
    ),
    # The contents of box.info.replication.
    "C1": ("interop/test_stream.py::test_box_info_shows_both_sides_of_a_pair",),
    # Transactions are applied atomically.
    "C2": (
        (
            "scenarios/test_subscribe.py::"
            "test_conflict_anywhere_in_a_transaction_applies_none_of_it_and_stops_later_ones"
        ),
        "interop/test_conflicts.py::test_conflict_inside_a_transaction_applies_none_of_it",
    ),
    # Every mix of local and global rows.
    "C3": ("interop/test_stream.py::test_transaction_boundaries_survive_every_mix_of_local_and_global_rows",),
    # Transactions that end with a local row.
    "C4": ("interop/test_stream.py::test_transaction_that_ends_with_a_local_row_does_not_block_a_returning_replica",),
    # Local and temporary spaces.
    "C6": (
        "scenarios/test_subscribe.py::test_only_definitions_of_local_and_temporary_spaces_are_replicated",
        "scenarios/test_subscribe.py::test_space_cannot_change_between_local_and_replicated",
        "scenarios/test_subscribe.py::test_local_rows_of_a_replica_do_not_keep_the_masters_logs",
        "interop/test_stream.py::test_local_rows_count_in_component_zero_only",
    ),
    # Component 0 never shows downstream.
    "C7": ("scenarios/test_subscribe.py::test_component_zero_of_a_master_is_not_adopted_by_the_replica",),
    # Rows become visible in log order.
    "C8": ("interop/test_stream.py::test_dependent_rows_become_visible_in_the_order_of_the_master",),
    # Constant changes instead of heartbeats.
    "C10": ("interop/test_stream.py::test_chain_stays_connected_under_constant_changes",),
    # Another replica set.
    "C12": (
        "scenarios/test_subscribe.py::test_instance_of_another_replica_set_is_rejected_and_becomes_an_orphan",
        "interop/test_bad_input.py::test_master_of_another_replica_set_is_rejected",
    ),
    # Lag of the downstream.
    "C13": (
        ("scenarios/test_subscribe.py::test_downstream_lag_is_the_duration_of_the_last_transaction"),
        "interop/test_stream.py::test_downstream_lag_is_the_duration_of_a_transaction",
    ),
    # A long scan of old logs.
    "C14": (
        "scenarios/test_subscribe.py::test_master_sends_heartbeats_while_it_searches_the_first_row",
        "interop/test_stream.py::test_lagging_replica_does_not_time_out_during_catch_up",
    ),
    # From anonymous to registered.
    "D1": (
        (
            "scenarios/test_anonymous.py::"
            "test_anonymous_replica_counts_its_own_rows_in_component_zero_and_becomes_a_member"
        ),
        "interop/test_anonymous.py::test_anonymous_replica_has_no_id_until_it_registers",
    ),
    # Rows that are missing when it registers.
    "D2": (
        "scenarios/test_anonymous.py::test_rows_missing_at_the_registration_of_an_anonymous_replica_are_not_lost",
        "interop/test_anonymous.py::test_no_row_is_lost_when_a_replica_registers_while_others_write",
    ),
    # An anonymous SUBSCRIBE without a UUID.
    "D5": ("scenarios/test_anonymous.py::test_anonymous_subscribe_without_a_uuid_is_rejected_and_the_master_survives",),
    # The queue of an anonymous replica.
    "D6": (
        "scenarios/test_join.py::test_term_and_queue_arrive_with_a_join_and_persist",
        "scenarios/test_join.py::test_anonymous_replica_has_the_queue_of_its_master",
        "interop/test_anonymous.py::test_synchronous_queue_of_an_anonymous_node_is_that_of_its_master",
    ),
    # Unreachable addresses.
    "E4": (
        "scenarios/test_orphan.py::test_unreachable_addresses_make_the_node_an_orphan",
        "scenarios/test_orphan.py::test_quorum_of_zero_runs_at_once",
        "scenarios/test_orphan.py::test_orphan_recovers_when_its_quorum_is_lowered",
        (
            "interop/test_orphan.py::"
            "test_unreachable_peers_make_a_reconfigured_member_an_orphan_unless_the_quorum_is_zero"
        ),
    ),
    # Lost rows of the member itself.
    "E6": (
        "scenarios/test_orphan.py::test_member_that_lost_the_end_of_its_log_recovers_its_own_rows",
        "interop/test_orphan.py::test_member_that_lost_its_newest_log_recovers_its_own_rows",
    ),
    # Duplicate keys: replication stops, or skips them.
    "F1": (
        "scenarios/test_conflicts.py::test_duplicate_key_stops_a_replica_permanently",
        "scenarios/test_conflicts.py::test_skipped_conflict_is_a_nop_in_the_log",
        "interop/test_conflicts.py::test_duplicate_key_stops_the_replica_and_changes_nothing",
    ),
    "F2": (
        "scenarios/test_conflicts.py::test_only_the_conflicting_rows_of_a_transaction_are_skipped",
        "interop/test_conflicts.py::test_with_skip_conflict_only_the_conflicting_rows_become_nops",
    ),
    # A failing write on the replica.
    "F3": ("node/upstream/test_row_applier.py::test_failed_write_rolls_back_all_rows_in_flight_and_notifies_waiters",),
    # Logs that the replica needs are gone.
    "F5": (
        "interop/test_bad_input.py::test_gap_in_the_logs_of_the_master_is_reported",
        "interop/test_bad_input.py::test_gap_in_our_logs_is_reported_to_a_real_replica",
    ),
    # Consumers across a restart.
    "G5": (
        "scenarios/test_log_collection.py::test_real_master_stores_the_position_of_a_node_across_a_restart",
        "scenarios/test_log_collection.py::test_real_master_forgets_a_node_whose_row_is_deleted",
        (
            "scenarios/test_log_collection.py::"
            "test_restarted_node_of_dialect_2_11_keeps_its_logs_for_members_that_have_not_returned"
        ),
        "scenarios/test_join.py::test_keys_of_newer_servers_are_kept_and_relayed",
    ),
    # Component 0 makes no gap.
    "G6": (
        "scenarios/test_log_collection.py::test_local_rows_and_checkpoints_of_a_master_make_no_gap",
        "interop/test_stream.py::test_local_rows_and_checkpoints_of_a_node_make_no_gap_for_a_returning_replica",
        "interop/test_stream.py::test_local_rows_and_checkpoints_of_a_real_master_make_no_gap_for_a_returning_node",
    ),
    # One CONFIRM per commit, ROLLBACK after a timeout, and later transactions.
    "H1": (
        "scenarios/test_synchronous.py::test_quorum_commits_two_lsns_and_a_timeout_rolls_them_back",
        "scenarios/test_synchronous.py::test_asynchronous_transactions_share_the_outcome_of_earlier_pending_ones",
        "interop/test_synchronous.py::test_replica_of_the_other_kind_completes_the_quorum",
        "interop/test_synchronous.py::test_timeout_rolls_back_on_both_sides",
        "interop/test_synchronous.py::test_transactions_after_a_timeout_are_rolled_back_in_reverse_order",
        "interop/test_synchronous.py::test_asynchronous_transactions_are_pending_after_synchronous_ones",
    ),
    # Order, changing quorums, changing members and owners.
    "H2": (
        "scenarios/test_synchronous.py::test_many_writers_commit_in_the_order_of_the_log",
        "scenarios/test_synchronous.py::test_changed_quorum_applies_to_pending_transactions",
        "scenarios/test_synchronous.py::test_empty_queue_moves_to_another_member",
        "interop/test_synchronous.py::test_changed_quorum_and_timeout_apply_to_pending_transactions",
        "interop/test_synchronous.py::test_many_writers_commit_in_the_order_of_the_log",
        "interop/test_synchronous.py::test_first_writer_to_an_empty_queue_becomes_its_owner",
    ),
    # Snapshots contain confirmed rows only.
    "H3": (
        "scenarios/test_synchronous.py::test_snapshot_contains_only_confirmed_rows",
        "scenarios/test_synchronous.py::test_wait_of_a_snapshot_for_a_verdict_is_limited",
        "interop/test_synchronous.py::test_snapshot_waits_for_the_verdict_on_its_rows",
        "interop/test_synchronous.py::test_snapshot_of_rolled_back_rows_is_not_written",
    ),
    # A repeated ACK.
    "H5": (
        "scenarios/test_synchronous.py::test_repeated_ack_of_a_replica_counts_once",
        "interop/test_synchronous.py::test_repeated_ack_of_a_replica_counts_once",
    ),
    # Ownership of the queue.
    "H9": (
        "scenarios/test_synchronous.py::test_queue_is_claimed_by_a_promotion_transferred_by_the_next_and_released",
        "simulation/test_elections.py::test_with_elections_off_a_promoted_node_writes_and_the_others_do_not",
        "interop/test_promotion.py::test_queue_is_claimed_taken_over_and_released",
    ),
    # The rows of a lost owner.
    "H12": (
        "scenarios/test_synchronous.py::test_rows_of_a_lost_owner_on_a_quorum_are_confirmed_by_the_next",
        "scenarios/test_synchronous.py::test_rows_of_a_lost_owner_without_a_quorum_are_not_confirmed",
        "interop/test_synchronous_recovery.py::test_queue_of_a_lost_owner_is_confirmed_by_the_member_that_clears_it",
        "interop/test_synchronous_recovery.py::test_transactions_of_a_lost_owner_without_a_quorum_are_rolled_back",
    ),
    # System spaces.
    "H13": ("scenarios/test_synchronous.py::test_system_spaces_stay_asynchronous_when_the_queue_is_claimed",),
    # Linearizable reads.
    "H14": (
        ("scenarios/test_synchronous.py::test_linearizable_transaction_begins_when_a_quorum_has_answered_a_new_query"),
        "simulation/test_linearizable.py::test_read_on_an_isolated_member_waits_until_it_is_reconnected",
        "simulation/test_linearizable.py::test_read_waits_for_pending_transactions",
        "simulation/test_linearizable.py::test_no_read_is_stale",
        "interop/test_linearizable.py::test_every_member_reads_earlier_commits",
    ),
    # Modes, dead leaders, restarts.
    "I1": (
        "scenarios/test_elections.py::test_single_node_in_each_election_mode",
        "scenarios/test_elections.py::test_dead_leader_is_replaced_and_follows_when_it_returns",
        "scenarios/test_elections.py::test_candidates_start_before_their_quorum",
        "simulation/test_elections.py::test_killed_leader_is_replaced_in_time_without_losing_confirmed_rows",
        "simulation/test_elections.py::test_a_voter_never_leads",
        "simulation/test_elections.py::test_a_restart_keeps_term_and_vote",
        "interop/test_elections.py::test_candidates_of_both_kinds_elect_a_leader_and_replace_a_lost_one",
        "interop/test_elections.py::test_term_and_vote_are_in_the_log_and_survive_a_crash",
    ),
    # Transactions replicated by a dead leader.
    "I2": (
        "scenarios/test_elections.py::test_next_leader_commits_transactions_replicated_by_the_dead_one",
        "scenarios/test_elections.py::test_candidate_without_rows_of_a_quorum_is_not_elected",
        "interop/test_elections.py::test_next_leader_commits_transactions_of_a_dead_one",
    ),
    # Fencing.
    "I5": (
        "scenarios/test_elections.py::test_isolated_leader_resigns_and_the_next_one_decides_its_queue",
        "scenarios/test_elections.py::test_leader_that_regains_its_quorum_before_an_election_continues",
        "scenarios/test_elections.py::test_unfenced_leader_continues_and_contradictions_are_found",
        "simulation/test_elections.py::test_with_strict_fencing_there_are_never_two_leaders",
        "interop/test_elections.py::test_leader_without_a_quorum_is_fenced_and_the_next_decides_pending_transactions",
        ("interop/test_elections.py::test_unfenced_leader_continues_alone_and_confirms_when_the_others_return"),
    ),
    # A missed term.
    "I6": (
        "scenarios/test_elections.py::test_missed_term_is_sent_with_the_subscription",
        ("interop/test_elections.py::test_election_needs_a_quorum_and_returning_member_learns_the_term"),
    ),
    # Rows that the new leader rolled back.
    "I8": ("scenarios/test_elections.py::test_rolled_back_rows_of_an_old_leader_do_not_return",),
    # A hanging leader.
    "I9": (
        "scenarios/test_elections.py::test_hanging_leader_with_open_connections_is_replaced",
        "scenarios/test_elections.py::test_leader_with_a_failing_log_is_replaced",
        "interop/test_elections.py::test_hanging_leader_is_replaced_and_follows_when_it_resumes",
    ),
    # Manual promotion.
    "J1": (
        "scenarios/test_promotion.py::test_promotion_wins_in_a_new_term_and_the_previous_leader_steps_down",
        "simulation/test_elections.py::test_manual_leader_is_the_member_promoted_last",
        "interop/test_elections.py::test_every_candidate_can_be_promoted_in_one_term_and_the_previous_leader_steps_down",
    ),
    # Every mode, role and call.
    "J3": (
        "scenarios/test_promotion.py::test_promote_and_demote_with_elections_off",
        "scenarios/test_promotion.py::test_demote_with_elections_off_releases_an_outdated_queue_of_another_member",
        "scenarios/test_promotion.py::test_demote_with_elections_off_is_rejected_while_another_member_leads",
        "scenarios/test_promotion.py::test_voter_and_anonymous_replica_are_not_promoted_and_do_not_block_a_promotion",
        "scenarios/test_promotion.py::test_promote_and_demote_of_elected_leaders_and_followers",
        "scenarios/test_promotion.py::test_promotion_without_a_quorum_of_peers_is_an_error",
        "scenarios/test_promotion.py::test_mode_change_ends_a_promotion",
        "scenarios/test_promotion.py::test_one_promotion_or_demotion_at_a_time",
        "scenarios/test_promotion.py::test_promotion_fails_when_the_queue_changes_its_owner_meanwhile",
        "scenarios/test_promotion.py::test_promotion_fails_when_a_newer_term_starts_while_it_waits_for_its_quorum",
        "scenarios/test_promotion.py::test_concurrent_promotions_of_all_members",
        "node/synchro/test_promotion.py::test_promotion_fails_when_another_member_wins_its_term_or_starts_the_next",
        "interop/test_promotion.py::test_redundant_promote_and_demote_change_nothing",
    ),
    # The term arrives before the promotion.
    "J6": (
        "scenarios/test_promotion.py::test_term_arrives_before_the_promotion_in_it",
        "scenarios/test_promotion.py::test_members_know_the_term_before_the_queue_changes_its_owner",
    ),
    # Asynchronous writes of an old term.
    "K1": (
        "scenarios/test_split_brain.py::test_asynchronous_write_in_an_old_term_is_a_split_brain",
        "interop/test_split_brain.py::test_contradictory_histories_stop_replication_and_change_nothing",
    ),
    # A CONFIRM of an old term.
    "K2": (
        "scenarios/test_split_brain.py::test_confirm_in_an_old_term_of_rows_that_the_new_owner_lacks",
        "scenarios/test_split_brain.py::test_confirm_in_an_old_term_of_rows_that_the_new_owner_confirmed",
        "interop/test_split_brain.py::test_contradictory_histories_stop_replication_and_change_nothing",
        "interop/test_split_brain.py::test_histories_that_only_look_contradictory_converge",
    ),
    # A ROLLBACK of an old term.
    "K3": (
        "scenarios/test_split_brain.py::test_rollback_in_an_old_term_of_rows_that_the_new_owner_confirmed",
        "scenarios/test_split_brain.py::test_rollback_in_an_old_term_of_rows_that_the_new_owner_lacks",
        "interop/test_split_brain.py::test_contradictory_histories_stop_replication_and_change_nothing",
        "interop/test_split_brain.py::test_histories_that_only_look_contradictory_converge",
    ),
    # Two promotions in one term.
    "K4": (
        "scenarios/test_split_brain.py::test_two_promotions_in_one_term",
        "scenarios/test_split_brain.py::test_promotion_and_demotion_in_one_term",
        "interop/test_split_brain.py::test_contradictory_histories_stop_replication_and_change_nothing",
    ),
    # A PROMOTE that contradicts the queue.
    "K5": (
        "scenarios/test_split_brain.py::test_promotion_without_confirmed_rows",
        "scenarios/test_split_brain.py::test_promotion_with_rolled_back_rows",
        "scenarios/test_split_brain.py::test_promotion_with_rolled_back_rows_while_others_are_pending",
        "scenarios/test_split_brain.py::test_promotion_that_cannot_be_written_is_rejected_with_the_reason",
        "interop/test_split_brain.py::test_contradictory_histories_stop_replication_and_change_nothing",
    ),
    # A very old CONFIRM.
    "K6": (
        "scenarios/test_split_brain.py::test_very_old_confirm_is_accepted",
        "scenarios/test_split_brain.py::test_old_confirm_in_a_recent_packet",
        "interop/test_split_brain.py::test_old_confirm_of_confirmed_rows_is_harmless",
    ),
    # A released queue.
    "K7": (
        "scenarios/test_split_brain.py::test_asynchronous_write_after_the_queue_was_released_is_accepted",
        "interop/test_split_brain.py::test_histories_that_only_look_contradictory_converge",
    ),
    # Schemas without the filter.
    "K8": ("scenarios/test_split_brain.py::test_data_of_an_old_schema_is_not_checked_before_its_upgrade",),
    # Rows are filtered by originator, not by relay.
    "K9": (
        "scenarios/test_split_brain.py::test_rows_are_judged_by_their_originator",
        "scenarios/test_split_brain.py::test_rows_of_a_former_owner_keep_their_old_term_through_any_relay",
        "interop/test_promotion.py::test_chain_relays_verdicts_in_order",
    ),
    # Rows of two owners at once.
    "K10": (
        "scenarios/test_split_brain.py::test_rows_of_both_owners_reach_a_slow_node_together",
        "scenarios/test_split_brain.py::test_rows_of_the_old_owner_arrive_during_the_write_of_our_promotion",
    ),
    # Headers and names of files.
    "L1": ("scenarios/test_files.py::test_files_state_their_instance_start_and_predecessor",),
    # Missing files and missing LSNs.
    "L3": (
        "scenarios/test_files.py::test_missing_log_is_reported_as_a_gap_at_startup",
        "scenarios/test_files.py::test_missing_lsns_inside_a_log_are_skipped",
    ),
    # Empty logs, logs without an end, leftovers.
    "L4": (
        "scenarios/test_files.py::test_empty_logs_unfinished_logs_and_leftover_files_do_not_prevent_a_start",
        "scenarios/test_files.py::test_empty_last_log_is_continued",
    ),
    # Files of older servers, and their upgrade.
    "L6": (
        "scenarios/test_files.py::test_node_on_files_of_an_older_server_is_a_master_with_that_schema",
        "scenarios/test_files.py::test_node_follows_a_real_server_through_a_schema_upgrade",
        "interop/test_join_and_follow.py::test_node_starts_from_files_of_a_real_replica_and_the_replica_from_those_of_the_node",
    ),
    # Interleaved transactions.
    "L7": ("scenarios/test_files.py::test_interleaved_transactions_are_rejected_and_recovered_with_force",),
}
"""Id of a scenario: the tests that cover it, below `tests/`."""

KNOWN_KILLERS: Final[dict[str, tuple[str, ...]]] = {
    # Unconfirmed rows are read on replicas, and after a restart.
    "Tarantool #5229": (
        "scenarios/test_known_killers.py::test_unconfirmed_rows_are_read_by_no_member_even_after_a_restart",
        "simulation/test_linearizable.py::test_read_waits_for_pending_transactions",
    ),
    # Values lost from a set in partitions.
    "Tarantool #5441": ("scenarios/test_known_killers.py::test_no_value_of_a_set_is_lost_in_partitions",),
    # The queue passes to the next writer without a decision.
    "Tarantool #6034": (
        "scenarios/test_synchronous.py::test_queue_is_claimed_by_a_promotion_transferred_by_the_next_and_released",
    ),
    # Wrong totals of a bank.
    "Tarantool #6099": ("scenarios/test_known_killers.py::test_total_is_constant_in_partitions",),
    # The quorum grows before a joining member can acknowledge.
    "Tarantool #10087": (
        "scenarios/test_known_killers.py::test_joining_replica_counts_for_the_quorum_once_it_can_acknowledge",
        "scenarios/test_synchronous.py::test_changed_quorum_applies_to_pending_transactions",
    ),
    # A promotion never ends, because the winner is unreachable.
    "Tarantool #10836": ("scenarios/test_known_killers.py::test_promotion_ends_even_if_only_others_know_the_winner",),
    # A joining replica misses rows.
    "Tarantool #11028": ("scenarios/test_known_killers.py::test_replica_that_joins_during_snapshots_misses_no_row",),
    # Nine bugs of the queue: order, cascades, snapshots, joins.
    "Tarantool #11180": (
        ("scenarios/test_known_killers_queue.py::test_writers_that_wait_for_a_full_queue_keep_the_order_of_the_others"),
        "scenarios/test_known_killers_queue.py::test_rejected_write_does_not_undo_later_writes",
        "scenarios/test_known_killers_queue.py::test_failed_write_rolls_back_all_newer_ones",
        "scenarios/test_known_killers_queue.py::test_snapshot_states_the_end_of_its_data",
        "scenarios/test_known_killers_queue.py::test_joining_replica_gets_rows_pending_for_the_log_once",
        "scenarios/test_known_killers_queue.py::test_joining_replica_gets_no_row_rejected_by_the_log_during_the_join",
        "scenarios/test_known_killers_queue.py::test_joining_replica_gets_no_row_rolled_back_during_the_join",
        "scenarios/test_known_killers_queue.py::test_joining_replica_gets_no_verdict_on_rows_that_it_lacks",
        "scenarios/test_known_killers_queue.py::test_known_verdict_is_no_contradiction_for_a_joining_replica",
    ),
    # A leader waits for an outdated quorum.
    "Tarantool #11574": (
        "scenarios/test_known_killers.py::test_waiting_leader_claims_the_queue_after_the_quorum_is_lowered",
    ),
    # A member with elections off prevents any election.
    "Tarantool #12018": (
        "scenarios/test_known_killers.py::test_member_with_elections_off_does_not_prevent_an_election",
    ),
    # A promotion waits for rows that another member has already decided.
    "Tarantool #12076": (
        ("scenarios/test_known_killers.py::test_pending_promotion_ends_when_another_member_clears_the_queue"),
        "scenarios/test_promotion.py::test_promotion_fails_when_the_queue_changes_its_owner_meanwhile",
    ),
    # A master that lost its newest logs never receives its own rows again.
    "Tarantool #12264": (
        "scenarios/test_orphan.py::test_member_that_lost_the_end_of_its_log_recovers_its_own_rows",
        "interop/test_orphan.py::test_member_that_lost_its_newest_log_recovers_its_own_rows",
    ),
    # A rollback by timeout and a confirmation of the same rows merge silently.
    "Tarantool #13085": (
        "scenarios/test_known_killers.py::test_ack_during_the_write_of_a_rollback_confirms_nothing",
        "scenarios/test_known_killers.py::test_rollback_that_contradicts_the_next_leader_is_found",
        "scenarios/test_split_brain.py::test_rollback_in_an_old_term_of_rows_that_the_new_owner_confirmed",
    ),
    # Votes are not persisted.
    "PySyncObj #84": (
        "scenarios/test_known_killers_journal.py::test_voter_that_loses_power_during_a_vote_votes_once_per_term",
        "simulation/test_elections.py::test_a_restart_keeps_term_and_vote",
    ),
    # The log is never synced.
    "PySyncObj #98": (
        "scenarios/test_known_killers_journal.py::test_committed_rows_survive_a_power_loss_of_all_members",
    ),
    # Members differ after a restart.
    "PySyncObj #133": (
        "scenarios/test_known_killers_journal.py::test_members_agree_on_the_membership_after_all_have_restarted",
    ),
    # The log is not applied until peers have answered.
    "PySyncObj #139": ("scenarios/test_known_killers_journal.py::test_restarted_node_recovers_its_data_without_peers",),
    # The commit index is newer than the log.
    "PySyncObj #197": (
        "scenarios/test_known_killers_journal.py::test_replica_that_lost_confirmed_rows_receives_them_again",
    ),
    # Terms restart at zero when all members restart.
    "PySyncObj #202": (
        "scenarios/test_known_killers_journal.py::test_slow_restart_overwrites_nothing",
        "simulation/test_elections.py::test_restart_of_all_members_elects_a_leader_in_a_new_term",
    ),
}
"""Ticket of a bug in another system: the tests that cover it, below `tests/`."""
