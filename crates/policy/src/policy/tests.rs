use super::*;
use proptest::prelude::*;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn entry(text: &str) -> AllowEntry {
    text.parse().unwrap()
}

fn list(entries: &[&str]) -> Policy {
    Policy::allow_list(entries.iter().map(|e| entry(e)).collect())
}

/// A connection in few words: address, port, names from DNS, and `sni=`, `host=` or a protocol.
fn decide(policy: &Policy, addr: &str, port: u16, dns: &[&str], how: &str) -> Decision {
    let names: Vec<Name> = dns.iter().map(|n| name(n)).collect();
    let (claimed, protocol) = match how.split_once('=') {
        Some(("sni", n)) => (Some(Claimed::Sni(name(n))), Protocol::Tls),
        Some(("host", n)) => (Some(Claimed::Host(name(n))), Protocol::Http),
        Some(("ech", n)) => (Some(Claimed::Sni(name(n))), Protocol::TlsEch),
        _ => (
            None,
            match how {
                "tls" => Protocol::Tls,
                "http" => Protocol::Http,
                "h2c" => Protocol::HttpTwo,
                "silent" => Protocol::Silent,
                _ => Protocol::Opaque,
            },
        ),
    };
    policy.decide_connection(&Destination {
        addr: addr.parse().unwrap(),
        port,
        names_from_dns: &names,
        claimed: claimed.as_ref(),
        protocol,
        synthetic: false,
        host_own: false,
    })
}

#[test]
fn off_denies_everything_and_says_so() {
    let policy = Policy::off();
    for how in ["sni=a.test", "host=a.test", "silent", "opaque"] {
        let decision = decide(&policy, "1.1.1.1", 443, &["a.test"], how);
        assert_eq!((decision.allow, decision.rule.as_str()), (false, "preset off"));
    }
    assert_eq!(policy.decide_name(&name("a.test")).rule, "preset off");
}

#[test]
fn web_allows_the_web_ports_of_public_addresses() {
    let policy = Policy::web();
    assert!(decide(&policy, "1.1.1.1", 443, &[], "sni=a.test").allow);
    assert!(decide(&policy, "1.1.1.1", 80, &[], "opaque").allow);
    assert!(decide(&policy, "2606:4700::1111", 443, &[], "tls").allow);
    assert_eq!(decide(&policy, "1.1.1.1", 22, &[], "silent").rule, "no rule allows it");
    for private in ["10.0.0.1", "169.254.169.254", "fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::a00:1", "203.0.113.5"]
    {
        let decision = decide(&policy, private, 443, &["a.test"], "sni=a.test");
        assert_eq!((decision.allow, decision.rule.as_str()), (false, "private address"), "{private}");
    }
}

#[test]
fn an_allow_list_needs_dns_and_claim_to_agree() {
    let policy = list(&["good.test", "*.wild.test:8443"]);
    for (addr, port, dns, how, allow) in [
        ("1.1.1.1", 443, &["good.test"][..], "sni=good.test", true),
        ("1.1.1.1", 80, &["good.test"], "host=good.test", true),
        ("1.1.1.1", 8443, &["a.wild.test"], "sni=a.wild.test", true),
        ("1.1.1.1", 8443, &["wild.test"], "sni=wild.test", false),
        ("1.1.1.1", 443, &["a.wild.test"], "sni=a.wild.test", false), // other port
        ("1.1.1.1", 443, &["good.test"], "sni=other.test", false),
        ("1.1.1.1", 443, &["good.test"], "tls", false),
        ("1.1.1.1", 443, &["good.test"], "ech=good.test", false),
        ("1.1.1.1", 443, &["good.test"], "opaque", false),
        ("1.1.1.1", 443, &["good.test"], "silent", false),
        ("1.1.1.1", 80, &["good.test"], "h2c", false),
        ("1.1.1.1", 80, &["good.test"], "http", false),
        ("1.1.1.1", 443, &[], "sni=good.test", false),
        ("1.1.1.1", 443, &["other.test"], "sni=good.test", false),
        ("1.1.1.1", 8443, &["a.wild.test"], "silent", true),
        ("1.1.1.1", 8443, &["a.wild.test"], "opaque", true),
        ("1.1.1.1", 8443, &["a.wild.test"], "sni=b.wild.test", false),
        ("10.0.0.1", 443, &["good.test"], "sni=good.test", false),
        ("203.0.113.5", 443, &[], "tls", false),
    ] {
        let decision = decide(&policy, addr, port, dns, how);
        assert_eq!(decision.allow, allow, "{addr} {port} {dns:?} {how}: {decision:?}");
    }
    assert_eq!(decide(&policy, "1.1.1.1", 443, &["good.test"], "sni=good.test").rule, "allow good.test");
}

#[test]
fn names_are_looked_up_only_if_a_rule_names_them() {
    let policy = list(&["good.test:443", "*.wild.test", "10.0.0.0/8:5432"]);
    for (text, allow) in [("good.test", true), ("x.good.test", false), ("a.b.wild.test", true), ("wild.test", false)] {
        assert_eq!(policy.decide_name(&name(text)).allow, allow, "{text}");
    }
    assert!(Policy::web().decide_name(&name("anything.test")).allow);
}

#[test]
fn private_addresses_need_a_private_name_or_a_range() {
    let mut policy = list(&["good.test", "10.1.0.0/16:5432"]);
    let private = "10.1.2.3".parse().unwrap();
    assert!(decide(&policy, "10.1.2.3", 5432, &[], "silent").allow);
    assert!(!decide(&policy, "10.2.2.3", 5432, &[], "silent").allow);
    assert!(!decide(&policy, "10.1.2.3", 443, &["good.test"], "sni=good.test").allow);
    assert!(policy.decide_answer(&name("good.test"), private).allow, "the range is open on some port");
    assert!(!policy.decide_answer(&name("good.test"), "10.2.0.1".parse().unwrap()).allow);
    policy.allow_private_name(name("good.test"), 443);
    assert!(decide(&policy, "10.9.2.3", 443, &["good.test"], "sni=good.test").allow);
    assert!(!decide(&policy, "10.9.2.3", 80, &["good.test"], "host=good.test").allow, "only on its port");
    assert!(!decide(&policy, "10.9.2.3", 443, &["good.test"], "sni=other.test").allow);
    assert!(policy.decide_answer(&name("good.test"), "10.2.0.1".parse().unwrap()).allow);
}

#[test]
fn a_range_rule_for_everything_leaves_private_addresses_closed() {
    let policy = list(&["0.0.0.0/0:443", "[::/0]:443"]);
    assert!(decide(&policy, "1.1.1.1", 443, &[], "tls").allow);
    assert_eq!(decide(&policy, "169.254.169.254", 443, &[], "tls").rule, "private address");
    assert_eq!(decide(&policy, "::ffff:10.0.0.1", 443, &[], "tls").rule, "private address");
}

#[test]
fn an_ipv6_literal_matches_and_odd_wrappings_count_as_what_they_mean() {
    let policy = list(&["[2606:4700::1111]:443", "10.1.2.3:443"]);
    assert_eq!(decide(&policy, "2606:4700::1111", 443, &[], "tls").rule, "allow [2606:4700::1111]:443");
    assert!(!decide(&policy, "2606:4700::1112", 443, &[], "tls").allow);
    assert!(decide(&policy, "::ffff:10.1.2.3", 443, &[], "tls").allow);
    assert!(!decide(&policy, "::ffff:10.1.2.4", 443, &[], "tls").allow);
}

#[test]
fn registries_name_the_registry_and_open_private_mirrors() {
    let host = |host: &str, port, private| RegistryHost { host: name(host), port, scheme: Scheme::Https, private };
    let mut policy = Policy::registries(vec![host("a.test", 443, false), host("mirror.test", 8443, true)]);
    assert_eq!(policy.name(), "registries");
    assert_eq!(decide(&policy, "1.1.1.1", 443, &["a.test"], "sni=a.test").rule, "registries a.test:443");
    assert!(decide(&policy, "10.0.0.9", 8443, &["mirror.test"], "sni=mirror.test").allow);
    assert!(!decide(&policy, "10.0.0.9", 443, &["a.test"], "sni=a.test").allow);
    policy.allow(entry("b.test"));
    assert_eq!(policy.name(), "registries + 1 rule");
    assert!(decide(&policy, "1.1.1.1", 443, &["b.test"], "sni=b.test").allow);
}

#[test]
fn the_host_s_own_addresses_need_a_rule_for_exactly_them() {
    let to = Destination {
        addr: "1.1.1.1".parse().unwrap(),
        port: 443,
        names_from_dns: &[],
        claimed: None,
        protocol: Protocol::Tls,
        synthetic: false,
        host_own: true,
    };
    assert!(!Policy::web().decide_connection(&to).allow);
    assert!(!list(&["1.0.0.0/8"]).decide_connection(&to).allow);
    assert!(list(&["1.1.1.1"]).decide_connection(&to).allow);
}

#[test]
fn a_policy_is_stored_without_its_name_and_reads_back() {
    let mut policy = Policy::web();
    policy.allow(entry("db.test:5432"));
    policy.deny(entry("10.0.0.0/8"));
    policy.allow_private_name(name("m.test"), 443);
    let text = serde_json::to_string(&policy).unwrap();
    assert!(!text.contains("+ 2 rules"));
    let back: Policy = serde_json::from_str(&text).unwrap();
    assert_eq!((back.name(), &back), ("web + 2 rules", &policy));
}

fn some_name() -> impl Strategy<Value = Name> {
    prop::sample::select(vec!["a.test", "b.test", "x.a.test", "y.x.a.test", "ba.test"]).prop_map(name)
}

fn some_entry() -> impl Strategy<Value = AllowEntry> {
    prop::sample::select(vec![
        "a.test",
        "*.a.test",
        "b.test:8443",
        "*.x.a.test:*",
        "10.0.0.0/8:*",
        "1.1.1.1",
        "0.0.0.0/0:443",
        "[::/0]:*",
        "fd00::/8",
        "169.254.169.254:80",
    ])
    .prop_map(entry)
}

fn some_policy() -> impl Strategy<Value = Policy> {
    let preset = prop::sample::select(vec![Policy::off(), Policy::web(), Policy::full(), Policy::allow_list(vec![])]);
    (preset, prop::collection::vec((any::<bool>(), some_entry()), 0..5), prop::collection::vec(some_name(), 0..2))
        .prop_map(|(mut policy, rules, private)| {
            for (allow, entry) in rules {
                if allow { policy.allow(entry) } else { policy.deny(entry) }
            }
            private.into_iter().for_each(|n| policy.allow_private_name(n, 443));
            policy
        })
}

#[derive(Debug, Clone)]
struct Case {
    addr: IpAddr,
    port: u16,
    dns: Vec<Name>,
    claimed: Option<Claimed>,
    protocol: Protocol,
    flags: (bool, bool),
}

impl Case {
    fn destination(&self) -> Destination<'_> {
        Destination {
            addr: self.addr,
            port: self.port,
            names_from_dns: &self.dns,
            claimed: self.claimed.as_ref(),
            protocol: self.protocol,
            synthetic: self.flags.0,
            host_own: self.flags.1,
        }
    }
}

fn some_case() -> impl Strategy<Value = Case> {
    use Protocol as P;
    let addresses =
        ["1.1.1.1", "10.1.2.3", "169.254.169.254", "fd00::1", "2606::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"];
    (
        prop::sample::select(addresses.to_vec()).prop_map(|a| a.parse().unwrap()),
        prop::sample::select(vec![80, 443, 8443, 22]),
        prop::collection::vec(some_name(), 0..3),
        prop::option::of(some_name().prop_map(Claimed::Sni)),
        prop::sample::select(vec![P::Tls, P::TlsEch, P::Http, P::HttpTwo, P::Opaque, P::Silent]),
        any::<(bool, bool)>(),
    )
        .prop_map(|(addr, port, dns, claimed, protocol, flags)| Case { addr, port, dns, claimed, protocol, flags })
}

proptest! {
    #[test]
    fn every_decision_names_its_rule(policy in some_policy(), case in some_case()) {
        let decision = policy.decide_connection(&case.destination());
        prop_assert!(!decision.rule.is_empty() && !decision.reason.is_empty());
        if decision.allow {
            let known = policy.rules().iter().any(|r| r.to_string() == decision.rule) || decision.rule.starts_with("preset ");
            prop_assert!(known, "{}", decision.rule);
        }
    }

    #[test]
    fn a_deny_never_allows_more(policy in some_policy(), case in some_case(), denied in some_entry()) {
        let mut stricter = policy.clone();
        stricter.deny(denied);
        let before = policy.decide_connection(&case.destination()).allow;
        let after = stricter.decide_connection(&case.destination()).allow;
        prop_assert!(before || !after);
        for name in &case.dns {
            prop_assert!(policy.decide_name(name).allow || !stricter.decide_name(name).allow);
        }
    }

    #[test]
    fn hearing_first_is_never_skipped_for_what_would_be_allowed(policy in some_policy(), case in some_case()) {
        let to = case.destination();
        if policy.decide_connection(&to).allow {
            let refused = policy.decide_before_hearing(to.addr, to.port, to.names_from_dns, to.synthetic, to.host_own);
            prop_assert_eq!(refused, None);
        }
    }

    #[test]
    fn parsers_take_any_text_and_print_what_they_read(text in "\\PC{0,40}") {
        if let Ok(entry) = text.parse::<AllowEntry>() {
            prop_assert_eq!(entry.to_string().parse::<AllowEntry>(), Ok(entry));
        }
        if let Ok(name) = text.parse::<Name>() {
            prop_assert_eq!(name.as_str().parse::<Name>(), Ok(name.clone()));
        }
    }

    #[test]
    fn a_non_public_address_is_never_given_out_without_a_reason(policy in some_policy(), name in some_name(), raw in any::<u32>()) {
        let address: IpAddr = std::net::Ipv4Addr::from(raw).into();
        let mapped: IpAddr = std::net::Ipv4Addr::from(raw).to_ipv6_mapped().into();
        prop_assert_eq!(policy.decide_answer(&name, address).allow, policy.decide_answer(&name, mapped).allow);
    }
}
